//! Plain lines on standard error.

use std::fmt::Display;
use std::io::Write;

/// Unlike `eprintln!` this does not panic when standard error is closed.
pub fn line(text: impl Display) {
    let _ = writeln!(std::io::stderr(), "agentenv-edge: {text}");
}
