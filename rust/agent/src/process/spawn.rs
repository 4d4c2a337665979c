//! Starting a process and following it to its end.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch, Mutex as AsyncMutex};

use super::{output, Config, End, Event, Process, Stream, END_KEPT};
use crate::state::Agent;
use crate::sys;
use crate::users::User;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why a process was not started; the caller's fault or ours.
pub enum StartError {
    Invalid(String),
    Failed(String),
}

/// Start a process as `user`; its events come to the receiver from the first byte on.
pub fn start(
    agent: &Arc<Agent>,
    config: Config,
    tag: Option<String>,
    user: &User,
    with_stdin: bool,
) -> Result<(Arc<Process>, mpsc::Receiver<Event>), StartError> {
    let ours = |error: io::Error| StartError::Failed(error.to_string());
    let (out_read, out_write) = sys::pipe().map_err(ours)?;
    let (err_read, err_write) = sys::pipe().map_err(ours)?;
    let (stdin, stdin_write) = stdin_pipe(with_stdin).map_err(ours)?;
    let child = command(agent, &config, user)?
        .stdin(stdin)
        .stdout(out_write)
        .stderr(err_write)
        .spawn()
        .map_err(|error| refused(&config.cmd, &error))?;
    let process = Arc::new(Process {
        pid: child.id().unwrap_or(0),
        tag,
        config,
        stdin: AsyncMutex::new(stdin_write),
        subscribers: Mutex::default(),
        ended: Mutex::default(),
    });
    let events = process.subscribe();
    agent.processes.add(&process);
    let receivers = [
        (Stream::Stdout, receiver(out_read).map_err(ours)?),
        (Stream::Stderr, receiver(err_read).map_err(ours)?),
    ];
    tokio::spawn(follow(
        Arc::clone(agent),
        Arc::clone(&process),
        child,
        receivers,
    ));
    Ok((process, events))
}

fn receiver(fd: OwnedFd) -> io::Result<pipe::Receiver> {
    pipe::Receiver::from_owned_fd(fd)
}

fn stdin_pipe(wanted: bool) -> io::Result<(Stdio, Option<pipe::Sender>)> {
    if !wanted {
        return Ok((Stdio::null(), None));
    }
    let (read, write) = sys::pipe()?;
    Ok((read.into(), Some(pipe::Sender::from_owned_fd(write)?)))
}

fn refused(cmd: &str, error: &io::Error) -> StartError {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR | libc::EACCES | libc::ENOEXEC | libc::EINVAL) => {
            StartError::Invalid(format!("'{cmd}' cannot be executed: {error}"))
        }
        Some(libc::E2BIG) => StartError::Invalid(format!("arguments of '{cmd}' are too long")),
        _ => StartError::Failed(format!("'{cmd}' was not started: {error}")),
    }
}

fn command(agent: &Agent, config: &Config, user: &User) -> Result<Command, StartError> {
    let cwd = working_folder(agent, config, user)?;
    let cwd = CString::new(cwd).map_err(|_| StartError::Invalid("cwd holds a NUL".to_owned()))?;
    if std::iter::once(&config.cmd)
        .chain(&config.args)
        .any(|word| word.contains('\0'))
    {
        return Err(StartError::Invalid("an argument holds a NUL".to_owned()));
    }
    let mut command = Command::new(program(&config.cmd));
    command
        .args(&config.args)
        .env_clear()
        .envs(environment(agent, config, user));
    let (uid, gid, groups) = (user.uid, user.gid, user.groups.clone());
    // SAFETY: the closure makes only async-signal-safe system calls on data made before the fork.
    unsafe { command.pre_exec(move || sys::become_user(uid, gid, &groups, &cwd)) };
    Ok(command)
}

/// The SDKs always run `/bin/bash -l -c`; an image without bash gets its /bin/sh, which knows both.
fn program(cmd: &str) -> &str {
    let usable = |path: &str| Path::new(path).exists();
    if cmd == "/bin/bash" && !usable(cmd) && usable("/bin/sh") {
        "/bin/sh"
    } else {
        cmd
    }
}

fn working_folder(agent: &Agent, config: &Config, user: &User) -> Result<String, StartError> {
    if let Some(cwd) = config.cwd.as_deref().filter(|cwd| !cwd.is_empty()) {
        let path = crate::fs::resolve(agent, user, cwd).map_err(StartError::Invalid)?;
        return if Path::new(&path).is_dir() {
            Ok(path)
        } else {
            Err(StartError::Invalid(format!("cwd '{cwd}' does not exist")))
        };
    }
    let default = agent.init().and_then(|init| init.default_workdir.clone());
    let mut choices = default
        .into_iter()
        .filter(|path| !path.is_empty())
        .chain([user.home.clone()]);
    Ok(choices
        .find(|path| Path::new(path).is_dir())
        .unwrap_or_else(|| "/".to_owned()))
}

/// Later wins: defaults, the user's, the sandbox's, the request's.
fn environment(agent: &Agent, config: &Config, user: &User) -> BTreeMap<String, String> {
    let mut env = BTreeMap::from([("PATH".to_owned(), DEFAULT_PATH.to_owned())]);
    if let Some(init) = agent.init() {
        env.extend(init.env.clone());
    }
    // The identity is this process's, whatever the image's environment says of another user.
    for (name, value) in [
        ("HOME", &user.home),
        ("USER", &user.name),
        ("LOGNAME", &user.name),
    ] {
        env.insert(name.to_owned(), value.clone());
    }
    env.extend(config.envs.clone());
    env.retain(|name, value| {
        !name.is_empty() && !name.contains(['=', '\0']) && !value.contains('\0')
    });
    env
}

/// Pump its output, wait for its end, tell it after the last output.
async fn follow(
    agent: Arc<Agent>,
    process: Arc<Process>,
    mut child: Child,
    receivers: [(Stream, pipe::Receiver); 2],
) {
    let (has_ended, ended) = watch::channel(false);
    let pumps = receivers.map(|(stream, receiver)| {
        tokio::spawn(output::pump(
            Arc::clone(&process),
            stream,
            receiver,
            ended.clone(),
        ))
    });
    let status = child.wait().await;
    let _ = has_ended.send(true);
    for pump in pumps {
        let _ = pump.await;
    }
    process.close_stdin().await;
    let end = describe(status);
    *process.ended.lock().expect("no holder panics") = Some(end.clone());
    process.publish(Event::End(end)).await;
    process
        .subscribers
        .lock()
        .expect("no holder panics")
        .clear();
    tokio::time::sleep(END_KEPT).await;
    agent.processes.remove(&process);
}

fn describe(status: io::Result<ExitStatus>) -> End {
    let signalled = |name: String| End {
        exit_code: -1,
        exited: false,
        status: name,
    };
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => End {
                exit_code: code,
                exited: true,
                status: format!("exit status {code}"),
            },
            (None, signal) => signalled(format!("signal: {}", signal_name(signal.unwrap_or(0)))),
        },
        Err(error) => signalled(format!("lost: {error}")),
    }
}

/// As Go's os package words them, which E2B's users see.
fn signal_name(signal: i32) -> String {
    match signal {
        libc::SIGHUP => "hangup",
        libc::SIGINT => "interrupt",
        libc::SIGQUIT => "quit",
        libc::SIGILL => "illegal instruction",
        libc::SIGABRT => "aborted",
        libc::SIGBUS => "bus error",
        libc::SIGFPE => "floating point exception",
        libc::SIGKILL => "killed",
        libc::SIGSEGV => "segmentation fault",
        libc::SIGPIPE => "broken pipe",
        libc::SIGALRM => "alarm clock",
        libc::SIGTERM => "terminated",
        other => return format!("signal {other}"),
    }
    .to_owned()
}
