//! Starting a process and following it to its end.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex};

use tokio::net::unix::pipe;
use tokio::signal::unix::{signal, Signal, SignalKind};
use tokio::sync::{mpsc, watch, Mutex as AsyncMutex};

use super::group::{self, Group};
use super::{output, Config, End, Event, Process, Size, Stream, Terminal, END_KEPT};
use crate::state::Agent;
use crate::sys::child::{Identity, Program};
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
    let (ends, streams) = match streams {
        Streams::Pipes { stdin } => pipes(stdin),
        Streams::Terminal(size) => terminal(size, user),
    }
    .map_err(ours)?;
    // Asked for before a child can end.
    let children = signal(SignalKind::child()).map_err(ours)?;
    let program = program(agent, &config, user, streams, &ends, &group)?;
    let pid = program
        .start()
        .map_err(|error| refused(&config.cmd, &error))?;
    drop(program); // with the process's ends, or a terminal would never be hung up
    let process = Arc::new(Process {
        pid: pid.unsigned_abs(),
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
        children,
        ends.output,
    ));
    Ok((process, events))
}

fn pipes(with_stdin: bool) -> io::Result<(Ends, [OwnedFd; 3])> {
    let (out_read, out_write) = sys::pipe()?;
    let (err_read, err_write) = sys::pipe()?;
    let (stdin, stdin_write) = stdin_pipe(with_stdin)?;
    let ends = Ends {
        stdin: stdin_write,
        output: vec![
            (Stream::Stdout, pipe::Receiver::from_owned_fd(out_read)?),
            (Stream::Stderr, pipe::Receiver::from_owned_fd(err_read)?),
        ],
        terminal: None,
    };
    Ok((ends, [stdin, out_write, err_write]))
}

fn terminal(size: Size, user: &User) -> io::Result<(Ends, [OwnedFd; 3])> {
    let (terminal, theirs) = Terminal::open(size)?;
    // So that the user may open it by name, as `tty` and `ssh` do.
    let _ = std::os::unix::fs::fchown(&theirs, Some(user.uid), None);
    let ends = Ends {
        stdin: None,
        output: Vec::new(),
        terminal: Some(terminal),
    };
    Ok((ends, [theirs.try_clone()?, theirs.try_clone()?, theirs]))
}

fn stdin_pipe(wanted: bool) -> io::Result<(OwnedFd, Option<pipe::Sender>)> {
    if !wanted {
        return Ok((std::fs::File::open("/dev/null")?.into(), None));
    }
    let (read, write) = sys::pipe()?;
    Ok((read, Some(pipe::Sender::from_owned_fd(write)?)))
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

fn program(
    agent: &Agent,
    config: &Config,
    user: &User,
    streams: [OwnedFd; 3],
    ends: &Ends,
    group: &Group,
) -> Result<Program, StartError> {
    let text = |what: &str, text: String| {
        CString::new(text).map_err(|_| StartError::Invalid(format!("{what} holds a NUL")))
    };
    let env = environment(agent, config, user);
    let name = usable(&config.cmd);
    let words = std::iter::once(name.to_owned()).chain(config.args.clone());
    let variables = env.iter().map(|(name, value)| format!("{name}={value}"));
    Ok(Program {
        paths: paths(name, &env["PATH"])
            .map(|path| text("the command", path))
            .collect::<Result<_, _>>()?,
        words: words
            .map(|word| text("an argument", word))
            .collect::<Result<_, _>>()?,
        env: variables
            .map(|pair| text("a variable", pair))
            .collect::<Result<_, _>>()?,
        streams,
        terminal: ends.terminal.is_some(),
        group: group.entry(),
        umask: None,
        identity: Identity {
            uid: user.uid,
            gid: user.gid,
            groups: user.groups.clone(),
            cwd: text("cwd", working_folder(agent, config, user)?)?,
        },
    })
}

/// Where a program of that name may be, as execvp(3) looks.
fn paths<'a>(name: &'a str, path: &'a str) -> impl Iterator<Item = String> + 'a {
    let folders = if name.is_empty() || name.contains('/') {
        ""
    } else {
        path
    };
    folders.split(':').map(move |folder| match folder {
        "" => name.to_owned(),
        folder => format!("{folder}/{name}"),
    })
}

/// The SDKs always run `/bin/bash -l -c`; an image without bash gets its /bin/sh, which knows both.
fn usable(cmd: &str) -> &str {
    let exists = |path: &str| Path::new(path).exists();
    if cmd == "/bin/bash" && !exists(cmd) && exists("/bin/sh") {
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
    mut children: Signal,
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
    let status = end_of(&process, &mut children).await;
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

async fn end_of(process: &Process, children: &mut Signal) -> io::Result<ExitStatus> {
    loop {
        if let Some(status) = sys::child::try_wait(process.pid as libc::pid_t)? {
            return Ok(status);
        }
        children.recv().await;
    }
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
