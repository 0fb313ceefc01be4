use super::*;

#[test]
fn nothing_yet() {}
