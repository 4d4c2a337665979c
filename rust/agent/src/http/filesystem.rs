//! filesystem.Filesystem over Connect.

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::Request;
use serde::Deserialize;
use serde_json::Value;

use super::connect::{self, Code, Fault, Pace};
use super::{auth, settle, watchers, Answer};
use crate::fs::{operations, resolve};
use crate::state::Agent;
use crate::users::User;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Message {
    path: String,
    depth: u32,
    source: String,
    destination: String,
}

pub async fn call(agent: Arc<Agent>, method: &str, request: Request<Incoming>) -> Answer {
    match method {
        "Stat" | "ListDir" | "MakeDir" | "Move" | "Remove" => {
            connect::within(Pace::of(&request), perform(&agent, method, request)).await
        }
        "WatchDir" | "CreateWatcher" | "GetWatcherEvents" | "RemoveWatcher" => {
            watchers::call(&agent, method, request).await
        }
        _ => settle(request, connect::unary(Err(unimplemented(method)))).await,
    }
}

fn unimplemented(method: &str) -> Fault {
    Fault::new(
        Code::Unimplemented,
        format!("{method} is not in this version of the agent"),
    )
}

async fn perform(
    agent: &Arc<Agent>,
    method: &str,
    request: Request<Incoming>,
) -> Result<Value, Fault> {
    let name = auth::user_name(&request);
    let message: Message = connect::message(request).await?;
    let user = agent
        .user(name.as_deref())
        .map_err(|message| Fault::new(Code::Unauthenticated, message))?;
    // An empty path means the home, which nobody wants gone by a forgotten argument.
    let given = [&message.path, &message.source, &message.destination];
    let needed = match method {
        "Remove" => &given[..1],
        "Move" => &given[1..],
        _ => &[],
    };
    if needed.iter().any(|path| path.is_empty()) {
        let fault = Fault::new(Code::InvalidArgument, "the request names no path");
        return Err(fault);
    }
    let path = |given: &str| absolute(agent, &user, given);
    let (path, source, destination) = (
        path(&message.path)?,
        path(&message.source)?,
        path(&message.destination)?,
    );
    let (method, depth, user) = (method.to_owned(), message.depth, user.clone());
    let work = move || match method.as_str() {
        "Stat" => operations::stat(&path),
        "ListDir" => operations::list(&path, depth),
        "MakeDir" => operations::make_dir(&path, &user),
        "Move" => operations::rename(&source, &destination, &user),
        _ => operations::remove(&path),
    };
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(Fault::new(Code::Internal, error.to_string())))
}

fn absolute(agent: &Agent, user: &User, given: &str) -> Result<String, Fault> {
    resolve(agent, user, given).map_err(|message| Fault::new(Code::InvalidArgument, message))
}
