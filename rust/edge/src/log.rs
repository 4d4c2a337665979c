//! Plain lines on standard error.

use std::fmt::Display;

pub fn line(text: impl Display) {
    agentenv_control::log("agentenv-edge", text);
}
