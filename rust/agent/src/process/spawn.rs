//! Starting a process and following it to its end.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch, Mutex as AsyncMutex};

use super::group::{self, Group};
use super::{output, Config, End, Event, Process, Size, Stream, Terminal, END_KEPT};
use crate::state::Agent;
use crate::users::User;
use crate::{sudo, sys};

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why a process was not started; the caller's fault or ours.
pub enum StartError {
    Invalid(String),
    Failed(String),
}

/// What a process gets as its standard streams.
#[derive(Debug, Clone, Copy)]
pub enum Streams {
    Pipes { stdin: bool },
    Terminal(Size),
}

/// Our ends of a process's standard streams.
struct Ends {
    stdin: Option<pipe::Sender>,
    output: Vec<(Stream, pipe::Receiver)>,
    terminal: Option<Arc<Terminal>>,
}

/// Start a process as `user`; its events come to the receiver from the first byte on.
pub fn start(
    agent: &Arc<Agent>,
    config: Config,
    tag: Option<String>,
    user: &User,
    streams: Streams,
) -> Result<(Arc<Process>, mpsc::Receiver<Event>), StartError> {
    let ours = |error: io::Error| StartError::Failed(error.to_string());
    if user.uid != 0 {
        sudo::place(); // it may have been installed since
    }
    let group = Group::create(agent);
    let mut command = command(agent, &config, user, group.entry())?;
    let ends = match streams {
        Streams::Pipes { stdin } => pipes(&mut command, stdin),
        Streams::Terminal(size) => terminal(&mut command, size, user),
    }
    .map_err(ours)?;
    let child = command
        .spawn()
        .map_err(|error| refused(&config.cmd, &error))?;
    drop(command); // with the process's ends, or a terminal would never be hung up
    let process = Arc::new(Process {
        pid: child.id().unwrap_or(0),
        tag,
        config,
        stdin: AsyncMutex::new(ends.stdin),
        terminal: ends.terminal,
        subscribers: Mutex::default(),
        ended: watch::Sender::default(),
        group,
    });
    let events = process.subscribe();
    agent.processes.add(&process);
    tokio::spawn(follow(
        Arc::clone(agent),
        Arc::clone(&process),
        child,
        ends.output,
    ));
    Ok((process, events))
}

fn pipes(command: &mut Command, with_stdin: bool) -> io::Result<Ends> {
    let (out_read, out_write) = sys::pipe()?;
    let (err_read, err_write) = sys::pipe()?;
    let (stdin, stdin_write) = stdin_pipe(with_stdin)?;
    command.stdin(stdin).stdout(out_write).stderr(err_write);
    Ok(Ends {
        stdin: stdin_write,
        output: vec![
            (Stream::Stdout, pipe::Receiver::from_owned_fd(out_read)?),
            (Stream::Stderr, pipe::Receiver::from_owned_fd(err_read)?),
        ],
        terminal: None,
    })
}

fn terminal(command: &mut Command, size: Size, user: &User) -> io::Result<Ends> {
    let (terminal, theirs) = Terminal::open(size)?;
    let theirs = std::fs::File::from(theirs);
    // So that the user may open it by name, as `tty` and `ssh` do.
    let _ = std::os::unix::fs::fchown(&theirs, Some(user.uid), None);
    command
        .stdin(theirs.try_clone()?)
        .stdout(theirs.try_clone()?)
        .stderr(theirs);
    // SAFETY: one system call that takes numbers; it runs after `become_user` made the session.
    unsafe { command.pre_exec(sys::take_terminal) };
    Ok(Ends {
        stdin: None,
        output: Vec::new(),
        terminal: Some(terminal),
    })
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

fn command(
    agent: &Agent,
    config: &Config,
    user: &User,
    group: Option<OwnedFd>,
) -> Result<Command, StartError> {
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
    let become_user = move || {
        if let Some(group) = &group {
            sys::join_cgroup(group.as_raw_fd())?;
        }
        sys::become_user(uid, gid, &groups, &cwd)
    };
    // SAFETY: the closure makes only async-signal-safe system calls on data made before the fork.
    unsafe { command.pre_exec(become_user) };
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
    output: Vec<(Stream, pipe::Receiver)>,
) {
    let (has_ended, ended) = watch::channel(false);
    let mut pumps: Vec<_> = output
        .into_iter()
        .map(|(stream, receiver)| {
            let process = Arc::clone(&process);
            tokio::spawn(output::pump(process, stream, receiver, ended.clone()))
        })
        .collect();
    if let Some(terminal) = process.terminal.clone() {
        let process = Arc::clone(&process);
        pumps.push(tokio::spawn(output::pump_terminal(
            process, terminal, ended,
        )));
    }
    let status = child.wait().await;
    let _ = has_ended.send(true);
    for pump in pumps {
        let _ = pump.await;
    }
    process.close_stdin().await;
    let end = describe(status, process.group.ran_out_of_memory());
    group::sweep();
    process.ended.send_replace(Some(end.clone()));
    process.publish(Event::End(end)).await;
    process
        .subscribers
        .lock()
        .expect("no holder panics")
        .clear();
    tokio::time::sleep(END_KEPT).await;
    agent.processes.remove(&process);
}

fn describe(status: io::Result<ExitStatus>, out_of_memory: bool) -> End {
    let signalled = |name: String| End {
        exit_code: -1,
        exited: false,
        status: name,
        out_of_memory,
    };
    match status {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => End {
                exit_code: code,
                exited: true,
                status: format!("exit status {code}"),
                out_of_memory,
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
