//! Standard input of processes: single pieces and client streams.

use std::sync::Arc;

use base64::prelude::{Engine as _, BASE64_STANDARD};
use bytes::BytesMut;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::Request;
use serde::Deserialize;
use serde_json::json;

use super::connect::{self, Code, Fault, Pace};
use super::processes::{select, stdin_fault, Selector};
use super::Answer;
use crate::process::Process;
use crate::state::Agent;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Input {
    stdin: Option<String>,
    pty: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StreamMessage {
    start: Option<StartMessage>,
    data: Option<DataMessage>,
}

#[derive(Debug, Deserialize)]
struct StartMessage {
    process: Selector,
}

#[derive(Debug, Deserialize)]
struct DataMessage {
    input: Input,
}

pub fn no_terminal(process: &Process) -> Fault {
    let message = format!("process {} was not started in a terminal", process.pid);
    Fault::new(Code::FailedPrecondition, message)
}

pub async fn write(process: &Process, input: &Input) -> Result<(), Fault> {
    let text = input.pty.as_ref().or(input.stdin.as_ref());
    let text = text.ok_or_else(|| Fault::new(Code::InvalidArgument, "the input is empty"))?;
    let data = BASE64_STANDARD
        .decode(text)
        .map_err(|error| Fault::new(Code::InvalidArgument, format!("input: {error}")))?;
    let written = match (&process.terminal, &input.pty) {
        (Some(terminal), _) => terminal.write(&data).await,
        (None, None) => process.write_stdin(&data).await,
        (None, Some(_)) => return Err(no_terminal(process)),
    };
    written.map_err(|error| stdin_fault(process, &error))
}

/// `StreamInput`: a start message names the process, data messages follow until the body ends.
pub async fn stream(agent: Arc<Agent>, request: Request<Incoming>) -> Answer {
    let pace = Pace::of(&request);
    let taken = tokio::select! {
        biased;
        taken = take(&agent, request.into_body()) => taken,
        () = pace.deadline() => Err(connect::late()),
    };
    match taken {
        Ok(()) => {
            let (sender, answer) = connect::stream();
            tokio::spawn(async move {
                if sender.message(&json!({})).await.is_ok() {
                    sender.end(Ok(())).await;
                }
            });
            answer
        }
        Err(fault) => connect::failed_stream(fault),
    }
}

async fn take(agent: &Agent, mut body: Incoming) -> Result<(), Fault> {
    let (mut data, mut process) = (BytesMut::new(), None);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| Fault::new(Code::InvalidArgument, e.to_string()))?;
        data.extend_from_slice(frame.data_ref().unwrap_or(&bytes::Bytes::new()));
        while let Some((flags, message)) = connect::take_envelope(&mut data)? {
            if flags & connect::END_OF_STREAM != 0 {
                return Ok(());
            }
            let message: StreamMessage = connect::parse(&message)?;
            if let Some(start) = message.start {
                process = Some(select(agent, &start.process)?);
            }
            if let Some(piece) = message.data {
                let process = process.as_ref().ok_or_else(|| {
                    Fault::new(Code::InvalidArgument, "data came before the start message")
                })?;
                write(process, &piece.input).await?;
            }
        }
    }
    Ok(())
}
