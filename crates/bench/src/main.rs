//! Load generator, benchmark rig, checkers and report.
fn main() {}
