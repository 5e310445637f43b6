//! The `halocline` command line.
fn main() {}
