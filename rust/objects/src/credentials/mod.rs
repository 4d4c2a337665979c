//! Who we are to an S3 store: the environment, the shared files, the program these name, and
//! what the cloud's own environment variables point to; in this order, the first that answers.
//!
//! The environment is read once, when the store is opened. Files are read again when they change.

mod ambient;
mod files;
mod process;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use object_store::aws::{AwsCredential, AwsCredentialProvider};
use object_store::CredentialProvider;

use files::{Files, Profile};
use process::Process;

/// Variables as a look-up, so that tests need not change the process.
pub(crate) type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

pub(crate) fn from_environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// The chain for the profile that the URL names, if it does. A named profile goes before keys in
/// the environment, as in the cloud's own tools.
pub(crate) fn chain(profile: Option<String>, variables: Variables<'_>) -> AwsCredentialProvider {
    let from_keys = match profile {
        None => keys(variables),
        Some(_) => None,
    };
    let home = variables("HOME").map(PathBuf::from).unwrap_or_default();
    let file = |name: &str, default: &str| {
        variables(name).map_or_else(|| home.join(".aws").join(default), PathBuf::from)
    };
    Arc::new(Chain {
        keys: from_keys.map(Arc::new),
        files: Files::new(
            file("AWS_SHARED_CREDENTIALS_FILE", "credentials"),
            file("AWS_CONFIG_FILE", "config"),
            profile
                .or_else(|| variables("AWS_PROFILE"))
                .unwrap_or_else(|| "default".into()),
        ),
        process: Process::default(),
        ambient: ambient::provider(variables),
    })
}

fn keys(variables: Variables<'_>) -> Option<AwsCredential> {
    Some(AwsCredential {
        key_id: variables("AWS_ACCESS_KEY_ID")?,
        secret_key: variables("AWS_SECRET_ACCESS_KEY")?,
        token: variables("AWS_SESSION_TOKEN"),
    })
}

struct Chain {
    keys: Option<Arc<AwsCredential>>,
    files: Files,
    process: Process,
    ambient: Option<AwsCredentialProvider>,
}

#[async_trait]
impl CredentialProvider for Chain {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        if let Some(keys) = &self.keys {
            return Ok(keys.clone());
        }
        match self.files.profile()? {
            Some(Profile::Keys(keys)) => Ok(keys),
            Some(Profile::Process(command)) => self.process.credential(&command).await,
            None => match &self.ambient {
                Some(provider) => provider.get_credential().await,
                None => Err(refused(format!(
                    "no credentials: neither AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY nor {}",
                    self.files.describe()
                ))),
            },
        }
    }
}

impl std::fmt::Debug for Chain {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Chain")
    }
}

/// The user must act.
fn refused(cause: String) -> object_store::Error {
    object_store::Error::Unauthenticated {
        path: String::new(),
        source: cause.into(),
    }
}

/// It may pass.
fn passing(cause: String) -> object_store::Error {
    object_store::Error::Generic {
        store: "credentials",
        source: cause.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    struct Home {
        folder: tempfile::TempDir,
        variables: HashMap<&'static str, String>,
    }

    impl Home {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            std::fs::create_dir(folder.path().join(".aws")).unwrap();
            let variables = HashMap::from([("HOME", folder.path().display().to_string())]);
            Self { folder, variables }
        }

        fn write(&self, name: &str, text: &str) {
            let path = self.folder.path().join(".aws").join(name);
            std::fs::write(path.with_extension("new"), text).unwrap();
            std::fs::rename(path.with_extension("new"), path).unwrap();
        }

        fn chain(&self, profile: Option<&str>) -> AwsCredentialProvider {
            chain(profile.map(String::from), &|name| {
                self.variables.get(name).cloned()
            })
        }
    }

    async fn key(provider: &AwsCredentialProvider) -> String {
        provider.get_credential().await.unwrap().key_id.clone()
    }

    #[tokio::test]
    async fn the_environment_goes_before_files_and_a_named_profile_before_it() {
        let mut home = Home::new();
        home.write("credentials", "[default]\naws_access_key_id=F\naws_secret_access_key=s\n[p]\naws_access_key_id=P\naws_secret_access_key=s\n");
        home.variables.insert("AWS_ACCESS_KEY_ID", "E".into());
        assert_eq!(key(&home.chain(None)).await, "F", "half a pair is none");
        home.variables.insert("AWS_SECRET_ACCESS_KEY", "s".into());
        assert_eq!(key(&home.chain(None)).await, "E");
        assert_eq!(key(&home.chain(Some("p"))).await, "P");
    }

    #[tokio::test]
    async fn a_changed_file_is_read_again() {
        let home = Home::new();
        let chain = home.chain(None);
        assert!(chain.get_credential().await.is_err());
        home.write(
            "credentials",
            "[default]\naws_access_key_id = A\naws_secret_access_key = s\n",
        );
        assert_eq!(key(&chain).await, "A");
        home.write(
            "credentials",
            "[default]\naws_access_key_id = B\naws_secret_access_key = s\n",
        );
        assert_eq!(key(&chain).await, "B");
    }

    #[tokio::test]
    async fn a_program_is_asked_again_only_before_its_answer_ends() {
        let home = Home::new();
        let count = home.folder.path().join("count");
        let answer = |expiration: &str| {
            let text = format!("echo x >> {}; echo '{{\"Version\": 1, \"AccessKeyId\": \"A\", \"SecretAccessKey\": \"s\"{expiration}}}'", count.display());
            let script = home.folder.path().join("answer.sh");
            std::fs::write(&script, text).unwrap();
            home.write(
                "config",
                &format!(
                    "[profile p]\ncredential_process = sh {}\n",
                    script.display()
                ),
            );
        };
        let asked = || {
            std::fs::read_to_string(&count)
                .unwrap_or_default()
                .lines()
                .count()
        };
        answer("");
        let chain = home.chain(Some("p"));
        for _ in 0..3 {
            assert_eq!(key(&chain).await, "A");
        }
        assert_eq!(asked(), 1);
        answer(", \"Expiration\": \"2020-01-01T00:00:00Z\"");
        let chain = home.chain(Some("p"));
        assert!(chain.get_credential().await.is_err(), "already over");
        let soon = chrono::DateTime::from_timestamp(
            std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .unwrap()
                .as_secs() as i64
                + 30,
            0,
        );
        answer(&format!(
            ", \"Expiration\": \"{}\"",
            soon.unwrap().to_rfc3339()
        ));
        let before = asked();
        for _ in 0..2 {
            assert_eq!(key(&chain).await, "A");
        }
        assert_eq!(asked(), before + 2, "less than the margin is left");
    }

    #[tokio::test]
    async fn what_a_program_says_wrong_is_told_without_its_secrets() {
        let home = Home::new();
        for command in [
            "false",
            "sh -c 'echo sesame'",
            "/nonexistent/x",
            "sh -c 'unbalanced",
            "echo '{\"Version\": 2, \"AccessKeyId\": \"a\", \"SecretAccessKey\": \"sesame\"}'",
        ] {
            home.write(
                "config",
                &format!("[default]\ncredential_process = {command}\n"),
            );
            let error = home
                .chain(None)
                .get_credential()
                .await
                .unwrap_err()
                .to_string();
            assert!(!error.contains("sesame"), "{error}");
        }
    }

    #[tokio::test]
    async fn nothing_is_asked_of_a_cloud_that_is_not_there() {
        let home = Home::new();
        let began = std::time::Instant::now();
        assert!(home.chain(None).get_credential().await.is_err());
        assert!(began.elapsed().as_secs() < 1);
    }
}
