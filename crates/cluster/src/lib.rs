//! One replica set as the daemon sees it: topology, pools, moves, change feed.
