//! Finds or fetches a mongod and runs replica sets on loopback for tests, demo and bench.
