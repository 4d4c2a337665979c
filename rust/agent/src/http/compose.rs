//! `POST /files/compose`: several files become one (E2B.md §2.3).

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use serde::Deserialize;

use super::upload::{bad, describe, explain, user, Failure};
use super::{connect, error, json_answer, Answer};
use crate::fs::metadata::Metadata;
use crate::fs::resolve;
use crate::fs::target::{self, Target, Wanted};
use crate::state::Agent;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Message {
    source_paths: Vec<String>,
    destination: String,
    username: Option<String>,
}

pub async fn post(agent: &Agent, request: Request<Incoming>) -> Answer {
    match perform(agent, request).await {
        Ok(path) => json_answer(StatusCode::OK, &describe(&path)),
        Err((status, message)) => error(status, &message),
    }
}

async fn perform(agent: &Agent, request: Request<Incoming>) -> Result<PathBuf, Failure> {
    let message: Message = connect::message(request)
        .await
        .map_err(|fault| bad(fault.message))?;
    if message.source_paths.is_empty() || message.destination.is_empty() {
        return Err(bad("source_paths and destination are needed".to_owned()));
    }
    let owner = user(agent, message.username.as_deref())?;
    let path = |given: &String| resolve(agent, &owner, given).map(PathBuf::from);
    let sources: Result<Vec<PathBuf>, String> = message.source_paths.iter().map(path).collect();
    let sources = sources.map_err(bad)?;
    let destination = path(&message.destination).map_err(bad)?;
    let wanted = Wanted {
        path: destination.clone(),
        owner,
        metadata: Metadata::new(),
    };
    let _turn = target::turn(&destination).await;
    tokio::task::spawn_blocking(move || join(&sources, wanted))
        .await
        .map_err(|failure| (StatusCode::INTERNAL_SERVER_ERROR, failure.to_string()))??;
    Ok(destination)
}

/// The sources go only when the whole is in its place.
fn join(sources: &[PathBuf], wanted: Wanted) -> Result<(), Failure> {
    let destination = wanted.path.clone();
    let mut target = Target::new(wanted);
    let mut files = Vec::new();
    for source in sources {
        let missing = |failure: io::Error| match failure.kind() {
            io::ErrorKind::NotFound => (
                StatusCode::NOT_FOUND,
                format!("path '{}' does not exist", source.display()),
            ),
            _ => explain(source, &failure),
        };
        let found = fs::metadata(source).map_err(missing)?;
        if !found.is_file() {
            return Err(bad(format!("'{}': not a regular file", source.display())));
        }
        files.push((source, found.dev(), found.ino()));
        let mut content = File::open(source).map_err(missing)?;
        io::copy(&mut content, &mut target).map_err(|failure| explain(&destination, &failure))?;
    }
    target
        .finish()
        .map_err(|failure| explain(&destination, &failure))?;
    // One that is the destination, by whatever name, now holds the whole.
    let whole = fs::metadata(&destination).map_err(|failure| explain(&destination, &failure))?;
    for (source, device, inode) in files {
        if (device, inode) != (whole.dev(), whole.ino()) {
            fs::remove_file(source).map_err(|failure| explain(source, &failure))?;
        }
    }
    Ok(())
}
