//! `credential_process`: a program of the user's that prints credentials as JSON, version 1.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use chrono::{DateTime, FixedOffset};
use object_store::aws::AwsCredential;
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};
use tokio::sync::Mutex;

use super::{passing, refused};

/// A person may have to wait for a sign-on server, no longer.
const DEADLINE: Duration = Duration::from_secs(30);
/// Requests signed now must still be valid when they arrive.
const MARGIN: Duration = Duration::from_secs(60);
const LONGEST_ANSWER: u64 = 64 << 10;

#[derive(Default)]
pub(super) struct Process {
    /// Held while the program runs: one asks, the others wait for its answer.
    last: Mutex<Option<Answered>>,
}

struct Answered {
    command: String,
    credential: Arc<AwsCredential>,
    expires: Option<SystemTime>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Answer {
    version: u32,
    access_key_id: String,
    secret_access_key: String,
    session_token: Option<String>,
    expiration: Option<DateTime<FixedOffset>>,
}

impl Answered {
    fn valid_for(&self, margin: Duration) -> bool {
        self.expires
            .is_none_or(|end| SystemTime::now() + margin < end)
    }
}

impl Process {
    pub async fn credential(&self, command: &str) -> object_store::Result<Arc<AwsCredential>> {
        let mut last = self.last.lock().await;
        let known = last.as_ref().filter(|known| known.command == command);
        if let Some(known) = known.filter(|known| known.valid_for(MARGIN)) {
            return Ok(known.credential.clone());
        }
        match ask(command).await {
            Ok(answered) => Ok(last.insert(answered).credential.clone()),
            // The old ones serve as long as they can.
            Err(error) => match known.filter(|known| known.valid_for(Duration::ZERO)) {
                Some(known) => Ok(known.credential.clone()),
                None => Err(error),
            },
        }
    }
}

async fn ask(command: &str) -> object_store::Result<Answered> {
    let words = shlex::split(command).filter(|words| !words.is_empty());
    let words =
        words.ok_or_else(|| refused("credential_process: quotes are not balanced".into()))?;
    let child = Command::new(&words[0])
        .args(&words[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .map_err(|error| refused(format!("credential_process {}: {error}", words[0])))?;
    let output = tokio::time::timeout(DEADLINE, output_of(child))
        .await
        .map_err(|_| {
            passing(format!(
                "credential_process {}: no answer in {DEADLINE:?}",
                words[0]
            ))
        })??;
    // The parser's own words could repeat a secret.
    let answer: Answer = serde_json::from_slice(&output).map_err(|_| {
        refused(format!(
            "credential_process {}: its answer is not the JSON expected",
            words[0]
        ))
    })?;
    check(answer, command)
}

async fn output_of(mut child: Child) -> object_store::Result<Vec<u8>> {
    let trouble = |error| passing(format!("credential_process: {error}"));
    let mut output = Vec::new();
    if let Some(pipe) = child.stdout.take() {
        pipe.take(LONGEST_ANSWER)
            .read_to_end(&mut output)
            .await
            .map_err(trouble)?;
    }
    let status = child.wait().await.map_err(trouble)?;
    match status.success() {
        true => Ok(output),
        false => Err(refused(format!("credential_process failed: {status}"))),
    }
}

fn check(answer: Answer, command: &str) -> object_store::Result<Answered> {
    if answer.version != 1 {
        return Err(refused(
            "credential_process: only version 1 is known".into(),
        ));
    }
    let answered = Answered {
        command: command.to_owned(),
        credential: Arc::new(AwsCredential {
            key_id: answer.access_key_id,
            secret_key: answer.secret_access_key,
            token: answer.session_token,
        }),
        expires: answer.expiration.map(SystemTime::from),
    };
    match answered.valid_for(Duration::ZERO) {
        true => Ok(answered),
        false => Err(refused(
            "credential_process: what it gave has expired".into(),
        )),
    }
}
