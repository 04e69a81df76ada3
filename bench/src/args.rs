//! Command line: `--name value` pairs and bare `--flag`s.

use std::str::FromStr;

/// The text after `--name`, if it is there.
pub fn text(name: &str) -> Option<String> {
    let mut args = std::env::args().skip_while(|arg| arg != name);
    args.next()?;
    args.next()
}

/// The number after `--name`, or `default`. Panics on something that is no number.
pub fn number<T: FromStr>(name: &str, default: T) -> T {
    match text(name) {
        None => default,
        Some(value) => value.parse().unwrap_or_else(|_| panic!("{name}: not a number: {value}")),
    }
}

/// Is the bare `--name` there?
pub fn flag(name: &str) -> bool {
    std::env::args().any(|arg| arg == name)
}
