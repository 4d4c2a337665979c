//! Paths and metadata of files, as the in-guest protocol shows them.

pub mod changes;
pub mod entry;
pub mod metadata;
pub mod operations;
pub mod pack;
pub mod target;
pub mod unpack;
pub mod watch;

use crate::state::Agent;
use crate::users::User;

/// Linux's PATH_MAX.
const MAX_PATH: usize = 4096;

/// E2B's rules: empty is the default folder, `~` the home, relative ones begin at the home.
pub fn resolve(agent: &Agent, user: &User, path: &str) -> Result<String, String> {
    if path.contains('\0') {
        return Err("a path cannot hold a NUL".to_owned());
    }
    if path.len() >= MAX_PATH {
        return Err(format!("a path cannot be longer than {MAX_PATH} bytes"));
    }
    if path.is_empty() {
        let folder = agent.init().and_then(|init| init.default_workdir.clone());
        return Ok(folder
            .filter(|path| !path.is_empty())
            .unwrap_or_else(|| user.home.clone()));
    }
    let joined = match path.strip_prefix('~') {
        Some("") => user.home.clone(),
        Some(rest) if rest.starts_with('/') => format!("{}{rest}", user.home.trim_end_matches('/')),
        Some(_) => {
            return Err(format!(
                "'{path}': the homes of other users cannot be named by '~'"
            ))
        }
        None if path.starts_with('/') => path.to_owned(),
        None => format!("{}/{path}", user.home.trim_end_matches('/')),
    };
    Ok(clean(&joined))
}

/// Without `.`, `..`, doubled and trailing slashes; lexical, like Go's path.Clean.
fn clean(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    format!("/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::clean;

    #[test]
    fn cleaning_is_lexical_and_stays_below_the_root() {
        for (given, wanted) in [
            ("/", "/"),
            ("/a//b/./c/", "/a/b/c"),
            ("/a/../..", "/"),
            ("/a/b/../c", "/a/c"),
        ] {
            assert_eq!(clean(given), wanted);
        }
    }
}
