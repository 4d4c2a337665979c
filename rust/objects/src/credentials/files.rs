//! The shared files of the cloud's tools: keys, or a program that gives them, per profile.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use object_store::aws::AwsCredential;

const LARGEST: u64 = 1 << 20;

#[derive(Clone)]
pub(super) enum Profile {
    Keys(Arc<AwsCredential>),
    Process(String),
}

/// Both files, and what they said when they were last read.
pub(super) struct Files {
    credentials: PathBuf,
    config: PathBuf,
    profile: String,
    read: Mutex<Option<(Stamps, Option<Profile>)>>,
}

/// Which files these are: a file that is replaced or written to gets another.
type Stamps = [Option<(u64, u64, i64, i64)>; 2];

impl Files {
    pub fn new(credentials: PathBuf, config: PathBuf, profile: String) -> Self {
        Self {
            credentials,
            config,
            profile,
            read: Mutex::default(),
        }
    }

    pub fn describe(&self) -> String {
        format!(
            "profile `{}` of {} or {}",
            self.profile,
            self.credentials.display(),
            self.config.display()
        )
    }

    pub fn profile(&self) -> object_store::Result<Option<Profile>> {
        let now = [stamp(&self.credentials), stamp(&self.config)];
        let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
        match &*read {
            Some((stamps, found)) if *stamps == now => Ok(found.clone()),
            _ => {
                let found = self.look()?;
                *read = Some((now, found.clone()));
                Ok(found)
            }
        }
    }

    fn look(&self) -> object_store::Result<Option<Profile>> {
        let credentials = section(&self.credentials, &self.profile)?;
        let config = match self.profile.as_str() {
            "default" => section(&self.config, "default")?,
            name => section(&self.config, &format!("profile {name}"))?,
        };
        let sections = [credentials, config];
        Ok(sections
            .iter()
            .find_map(keys)
            .map(|keys| Profile::Keys(Arc::new(keys)))
            .or_else(|| {
                let named = |section: &HashMap<_, _>| section.get("credential_process").cloned();
                sections.iter().find_map(named).map(Profile::Process)
            }))
    }
}

fn keys(section: &HashMap<String, String>) -> Option<AwsCredential> {
    Some(AwsCredential {
        key_id: section.get("aws_access_key_id")?.clone(),
        secret_key: section.get("aws_secret_access_key")?.clone(),
        token: section.get("aws_session_token").cloned(),
    })
}

fn stamp(path: &Path) -> Option<(u64, u64, i64, i64)> {
    let facts = std::fs::metadata(path).ok()?;
    Some((facts.ino(), facts.size(), facts.mtime(), facts.mtime_nsec()))
}

/// The settings under `[name]`; empty where file or section is missing.
fn section(path: &Path, name: &str) -> object_store::Result<HashMap<String, String>> {
    let text = match read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(HashMap::new()),
        Err(error) => return Err(super::refused(format!("{}: {error}", path.display()))),
        Ok(text) => text,
    };
    Ok(parse(&text, name))
}

fn read(path: &Path) -> io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)?
        .take(LARGEST)
        .read_to_string(&mut text)?;
    Ok(text)
}

fn parse(text: &str, name: &str) -> HashMap<String, String> {
    let (mut inside, mut found) = (false, HashMap::new());
    for line in text.lines() {
        let bare = line.trim();
        if bare.is_empty() || bare.starts_with(['#', ';']) {
            continue;
        }
        if let Some(title) = bare.strip_prefix('[') {
            let title = title.split(']').next().unwrap_or_default();
            inside = title.split_whitespace().eq(name.split_whitespace());
        } else if inside && !line.starts_with([' ', '\t']) {
            // Indented lines are settings nested below another.
            if let Some((key, value)) = bare.split_once('=').filter(|(_, v)| !v.trim().is_empty()) {
                found.insert(key.trim().to_ascii_lowercase(), value.trim().to_owned());
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_comments_and_nested_settings() {
        let text =
            "# x\n[default]\na=1\ns3 =\n  a = 9\n[profile  p]\nA = 2=2 \n;b=3\n[other]\na=4\n";
        assert_eq!(parse(text, "default")["a"], "1");
        assert_eq!(parse(text, "profile p")["a"], "2=2");
        assert_eq!(parse(text, "profile p").len(), 1);
        assert!(parse(text, "none").is_empty());
    }
}
