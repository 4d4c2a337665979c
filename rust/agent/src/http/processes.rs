//! process.Process over Connect.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use base64::prelude::{Engine as _, BASE64_STANDARD};
use hyper::body::Incoming;
use hyper::Request;
use serde::Deserialize;
use serde_json::{json, Value};
use tokio::sync::mpsc;

use super::connect::{self, Code, Fault, Gone, Pace, Sender};
use super::{auth, input, settle, Answer};
use crate::process::{self, Config, End, Event, Process, Size, StartError, Stream, Streams};
use crate::state::Agent;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ConfigMessage {
    cmd: String,
    args: Vec<String>,
    envs: HashMap<String, String>,
    cwd: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StartMessage {
    process: ConfigMessage,
    pty: Option<TerminalMessage>,
    tag: Option<String>,
    stdin: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TerminalMessage {
    size: Option<SizeMessage>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SizeMessage {
    cols: u16,
    rows: u16,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Selector {
    pid: Option<u32>,
    tag: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct SelectMessage {
    process: Selector,
    input: input::Input,
    signal: Value,
    pty: Option<TerminalMessage>,
}

pub async fn call(agent: Arc<Agent>, method: &str, request: Request<Incoming>) -> Answer {
    match method {
        "List" => settle(request, connect::unary(Ok(list(&agent)))).await,
        "Start" => start(agent, request).await,
        "Connect" => reconnect(&agent, request).await,
        "StreamInput" => input::stream(agent, request).await,
        "SendInput" | "SendSignal" | "CloseStdin" | "Update" => {
            connect::within(Pace::of(&request), act(&agent, method, request)).await
        }
        _ => {
            let message = format!("{method} is not in this version of the agent");
            let fault = Fault::new(Code::Unimplemented, message);
            settle(request, connect::unary(Err(fault))).await
        }
    }
}

fn list(agent: &Agent) -> Value {
    let shown: Vec<Value> = agent
        .processes
        .running()
        .iter()
        .map(|process| describe(process))
        .collect();
    json!({"processes": shown})
}

fn describe(process: &Process) -> Value {
    let config = &process.config;
    let mut shown = json!({
        "pid": process.pid,
        "config": {"cmd": config.cmd, "args": config.args, "envs": config.envs},
    });
    if let Some(cwd) = &config.cwd {
        shown["config"]["cwd"] = json!(cwd);
    }
    if let Some(tag) = &process.tag {
        shown["tag"] = json!(tag);
    }
    shown
}

/// The process that is meant. Raises `not_found` in the words the SDK looks for.
pub fn select(agent: &Agent, selector: &Selector) -> Result<Arc<Process>, Fault> {
    let (found, what) = match (selector.pid, &selector.tag) {
        (Some(pid), _) => (agent.processes.by_pid(pid), format!("pid {pid}")),
        (None, Some(tag)) => (agent.processes.by_tag(tag), format!("tag {tag}")),
        (None, None) => {
            return Err(Fault::new(
                Code::InvalidArgument,
                "the request names no process",
            ))
        }
    };
    found.ok_or_else(|| Fault::new(Code::NotFound, format!("process with {what} not found")))
}

async fn act(agent: &Agent, method: &str, request: Request<Incoming>) -> Result<Value, Fault> {
    let message: SelectMessage = connect::message(request).await?;
    let process = select(agent, &message.process)?;
    match method {
        "SendInput" => input::write(&process, &message.input).await?,
        "CloseStdin" => process.close_stdin().await,
        "Update" => update(&process, message.pty)?,
        _ => send_signal(&process, &message.signal)?,
    }
    Ok(json!({}))
}

/// Nothing but a terminal's size can change.
fn update(process: &Process, terminal: Option<TerminalMessage>) -> Result<(), Fault> {
    let Some(size) = terminal.and_then(|terminal| terminal.size) else {
        return Ok(());
    };
    let terminal = process.terminal.as_ref();
    let terminal = terminal.ok_or_else(|| input::no_terminal(process))?;
    terminal
        .resize(wanted_size(&size))
        .map_err(|error| Fault::new(Code::Internal, error.to_string()))
}

/// 80 by 24 where the client names none, as terminals always had.
fn wanted_size(size: &SizeMessage) -> Size {
    let or = |given: u16, default: u16| if given == 0 { default } else { given };
    Size {
        cols: or(size.cols, 80),
        rows: or(size.rows, 24),
    }
}

fn send_signal(process: &Process, signal: &Value) -> Result<(), Fault> {
    let number = match (signal.as_str(), signal.as_i64()) {
        (Some("SIGNAL_SIGTERM"), _) | (_, Some(15)) => libc::SIGTERM,
        (Some("SIGNAL_SIGKILL"), _) | (_, Some(9)) => libc::SIGKILL,
        _ => {
            return Err(Fault::new(
                Code::InvalidArgument,
                format!("unknown signal {signal}"),
            ))
        }
    };
    process
        .signal(number)
        .map_err(|error| match error.raw_os_error() {
            Some(libc::ESRCH) => Fault::new(
                Code::NotFound,
                format!("process with pid {} not found", process.pid),
            ),
            _ => Fault::new(Code::Internal, error.to_string()),
        })
}

async fn start(agent: Arc<Agent>, request: Request<Incoming>) -> Answer {
    let pace = Pace::of(&request);
    match begin(&agent, request).await {
        Ok((process, events)) => respond(process, events, pace, true),
        Err(fault) => connect::failed_stream(fault),
    }
}

async fn begin(
    agent: &Arc<Agent>,
    request: Request<Incoming>,
) -> Result<(Arc<Process>, mpsc::Receiver<Event>), Fault> {
    let name = auth::user_name(&request);
    let message: StartMessage = connect::first_message(request).await?;
    let given = message.process;
    if given.cmd.is_empty() {
        return Err(Fault::new(
            Code::InvalidArgument,
            "the request names no command",
        ));
    }
    let user = agent
        .user(name.as_deref())
        .map_err(|message| Fault::new(Code::Unauthenticated, message))?;
    let config = Config {
        cmd: given.cmd,
        args: given.args,
        envs: given.envs,
        cwd: given.cwd,
    };
    // Clients older than the `stdin` field expect it open (E2B.md §2.4).
    let streams = match message.pty {
        Some(pty) => Streams::Terminal(wanted_size(&pty.size.unwrap_or_default())),
        None => Streams::Pipes {
            stdin: message.stdin.unwrap_or(true),
        },
    };
    let start = || process::start(agent, config, message.tag, &user, streams);
    let started = agent.freezer.awake(start).await;
    started.map_err(|error| match error {
        StartError::Invalid(message) => Fault::new(Code::InvalidArgument, message),
        StartError::Failed(message) => Fault::new(Code::Internal, message),
    })
}

async fn reconnect(agent: &Agent, request: Request<Incoming>) -> Answer {
    let pace = Pace::of(&request);
    let found = match connect::first_message::<SelectMessage>(request).await {
        Ok(message) => select(agent, &message.process),
        Err(fault) => Err(fault),
    };
    match found {
        Ok(process) => {
            let events = process.subscribe();
            respond(process, events, pace, false)
        }
        Err(fault) => connect::failed_stream(fault),
    }
}

fn respond(
    process: Arc<Process>,
    events: mpsc::Receiver<Event>,
    pace: Pace,
    is_starter: bool,
) -> Answer {
    let (sender, answer) = connect::stream();
    if is_starter {
        tokio::spawn(end_at_deadline(Arc::clone(&process), pace.clone()));
    }
    tokio::spawn(async move {
        match relay(&sender, &process, events, &pace).await {
            Ok(Relayed::Ended) => sender.end(Ok(())).await,
            Ok(Relayed::DeadlinePassed) => {
                let message = "the command's deadline passed";
                sender
                    .end(Err(Fault::new(Code::DeadlineExceeded, message)))
                    .await;
            }
            Err(Gone) => {}
        }
    });
    answer
}

/// A process whose starter set a deadline does not outlive it, whoever listens.
async fn end_at_deadline(process: Arc<Process>, pace: Pace) {
    tokio::select! {
        () = process.wait() => {}
        () = pace.deadline() => drop(process.signal(libc::SIGKILL)),
    }
}

enum Relayed {
    Ended,
    DeadlinePassed,
}

/// After the deadline: for output that was on its way.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Send `start`, then everything that happens, until the end, the deadline or the client's leaving.
async fn relay(
    sender: &Sender,
    process: &Process,
    mut events: mpsc::Receiver<Event>,
    pace: &Pace,
) -> Result<Relayed, Gone> {
    sender
        .message(&json!({"event": {"start": {"pid": process.pid}}}))
        .await?;
    loop {
        tokio::select! {
            biased;
            () = sender.closed() => return Err(Gone),
            () = pace.deadline() => {
                let rest = tokio::time::timeout(LAST_WORDS, relay_output(sender, &mut events));
                return rest.await.unwrap_or(Ok(())).map(|()| Relayed::DeadlinePassed);
            }
            event = events.recv() => match event {
                Some(Event::Data(stream, data)) => send_output(sender, stream, &data).await?,
                Some(Event::End(end)) => {
                    sender.message(&json!({"event": {"end": describe_end(&end)}})).await?;
                    return Ok(Relayed::Ended);
                }
                None => return Ok(Relayed::Ended),
            },
            () = tokio::time::sleep(pace.keepalive) => {
                sender.message(&json!({"event": {"keepalive": {}}})).await?;
            }
        }
    }
}

/// What a process that is being killed still printed, up to its end.
async fn relay_output(sender: &Sender, events: &mut mpsc::Receiver<Event>) -> Result<(), Gone> {
    while let Some(Event::Data(stream, data)) = events.recv().await {
        send_output(sender, stream, &data).await?;
    }
    Ok(())
}

async fn send_output(sender: &Sender, stream: Stream, data: &[u8]) -> Result<(), Gone> {
    let name = match stream {
        Stream::Stdout => "stdout",
        Stream::Stderr => "stderr",
        Stream::Terminal => "pty",
    };
    let data = BASE64_STANDARD.encode(data);
    sender
        .message(&json!({"event": {"data": {name: data}}}))
        .await
}

fn describe_end(end: &End) -> Value {
    let mut shown = json!({"exitCode": end.exit_code, "exited": end.exited, "status": end.status});
    if end.exit_code != 0 {
        shown["error"] = json!(end.status);
    }
    // Not E2B's: its SDKs pass over it, ours tells a want of memory from a failed command by it.
    if end.out_of_memory {
        shown["outOfMemory"] = json!(true);
        shown["error"] = json!(format!("{} (the sandbox ran out of memory)", end.status));
    }
    shown
}

/// A write to a process that does not read any more is told as such.
pub fn stdin_fault(process: &Process, error: &io::Error) -> Fault {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Fault::new(
            Code::FailedPrecondition,
            format!("process {} has no open stdin", process.pid),
        ),
        _ => Fault::new(Code::Internal, error.to_string()),
    }
}
