//! What the agent knows, and its start.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, RwLock};
use std::time::Duration;

use agentenv_wire::Init;

use crate::stillness::{self, Stillness};
use crate::sudo;
use crate::users::{Database, User};
use crate::{control, http, process, sys};

/// E2B's in-guest API lives here.
pub const PORT: u16 = 49983;

/// For connections to the in-guest API that a snapshot cuts.
const CLOSING: Duration = Duration::from_millis(200);

/// What init keeps for us across our death.
pub struct Kept {
    /// What we were told, as one JSON document in a file in memory.
    pub memory: File,
    /// None where the sandbox's kernel is not Linux, and what lies below its root not ours.
    pub layers: Option<Layers>,
}

/// The root folders of the writable disk and the image, which no path leads to any more.
pub struct Layers {
    pub disk: File,
    pub image: File,
}

impl Layers {
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            disk: self.disk.try_clone()?,
            image: self.image.try_clone()?,
        })
    }
}

pub struct Agent {
    pub processes: process::Table,
    pub freezer: process::Freezer,
    pub connections: http::connections::Connections,
    pub watchers: http::watchers::Table,
    numbers: AtomicUsize,
    init: RwLock<Option<Arc<Init>>>,
    /// None when we run as an ordinary program.
    kept: Option<Mutex<Kept>>,
    runtime: OnceLock<tokio::runtime::Handle>,
    stillness: Stillness,
}

impl Agent {
    pub fn init(&self) -> Option<Arc<Init>> {
        self.init.read().expect("no holder panics").clone()
    }

    /// A number that is given once in the life of this agent.
    pub fn next_number(&self) -> usize {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether this is a sandbox's guest, whose names are ours to set.
    pub fn is_guest(&self) -> bool {
        self.kept.is_some()
    }

    /// Whether it has a kernel of its own, whose clock, randomness and network are ours to set. In
    /// other guests they are the host's.
    pub fn is_machine(&self) -> bool {
        let layers = |kept: &Mutex<Kept>| kept.lock().expect("no holder panics").layers.is_some();
        self.kept.as_ref().is_some_and(layers)
    }

    /// Whether it is a guest without one, started by `init::container`.
    pub fn is_container(&self) -> bool {
        self.is_guest() && !self.is_machine()
    }

    /// Take a new generation, durable across our own death.
    pub fn remember(&self, init: Init) -> io::Result<()> {
        if let Some(kept) = &self.kept {
            let memory = &mut kept.lock().expect("no holder panics").memory;
            memory.set_len(0)?;
            memory.rewind()?;
            memory.write_all(&serde_json::to_vec(&init)?)?;
        }
        *self.init.write().expect("no holder panics") = Some(Arc::new(init));
        Ok(())
    }

    /// Nobody is served from now on, and what the runtime waits for is left alone, until `go_on`:
    /// what is saved can be restored by any kernel. Blocking.
    pub fn be_still(&self) -> io::Result<()> {
        self.connections.shut_out();
        self.connections.wait_closed(CLOSING);
        self.runtime
            .get()
            .map_or(Ok(()), |it| self.stillness.keep(it))
    }

    /// See `Stillness::forget_events`.
    pub fn forget_events(&self) -> io::Result<()> {
        self.stillness.forget_events()
    }

    pub fn go_on(&self) {
        self.connections.let_in();
        self.stillness.go_on();
    }

    /// A runtime that was restored as good as dead is no use: then we end, and init starts us anew,
    /// which hears but knows nothing of the commands that run. Blocking.
    pub fn must_wake(&self) {
        let Some(runtime) = self.runtime.get() else {
            return;
        };
        if !stillness::comes(runtime, || ()) {
            println!("agentenv-agent: the runtime does not wake, starting anew");
            std::process::exit(1);
        }
    }

    /// The writable disk and the image below it. Unsupported: this is no machine.
    pub fn layers(&self) -> io::Result<Layers> {
        let kept = self.kept.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let kept = kept.lock().expect("no holder panics");
        let layers = kept.layers.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        layers.try_clone()
    }

    /// Nothing that an earlier agent had stopped may stay so: who asked for it got no answer.
    fn begin(&self) {
        process::prepare();
        if self.is_machine() {
            let thawed = self.layers().and_then(|layers| control::thaw(&layers.disk));
            if let Err(error) = thawed {
                println!("agentenv-agent: the disk cannot be thawed: {error}");
            }
        }
        if let Err(error) = self.freezer.release() {
            println!("agentenv-agent: processes cannot be released: {error}");
        }
    }

    /// The user of requests that name none.
    pub fn default_user(&self) -> Result<User, String> {
        let database = Database::load();
        match self
            .init()
            .and_then(|init| init.default_user.clone())
            .filter(|name| !name.is_empty())
        {
            Some(name) => database
                .find(&name)
                .ok_or_else(|| format!("the image's user '{name}' does not exist in it")),
            None => Ok(database.fallback()),
        }
    }

    /// The user called `name`, or the default. The message is E2B's (E2B.md §2.2).
    pub fn user(&self, name: Option<&str>) -> Result<User, String> {
        match name.filter(|name| !name.is_empty()) {
            Some(name) => Database::load()
                .find(name)
                .ok_or_else(|| format!("invalid username: '{name}'")),
            None => self.default_user(),
        }
    }
}

/// Run the agent; returns only when its runtime cannot go on.
pub fn serve(listen: SocketAddr, port: Option<control::Port>, mut kept: Option<Kept>) {
    sys::child::ignore_nothing();
    sys::block_sigio();
    sys::raise_file_limit();
    let memory = kept.as_mut().map(|kept| &mut kept.memory);
    let remembered = memory.and_then(control::recall).map(Arc::new);
    // Without a host to initialise us (tests) everything is open from the start.
    let init = remembered.or_else(|| port.is_none().then(Default::default));
    let without_freezer = kept.as_ref().is_some_and(|kept| kept.layers.is_none());
    let agent = Arc::new(Agent {
        processes: process::Table::default(),
        freezer: if without_freezer {
            process::Freezer::by_signals()
        } else {
            process::Freezer::default()
        },
        connections: http::connections::Connections::default(),
        watchers: http::watchers::Table::default(),
        numbers: AtomicUsize::new(1),
        init: RwLock::new(init),
        kept: kept.map(Mutex::new),
        runtime: OnceLock::new(),
        stillness: Stillness::default(),
    });
    if agent.is_guest() {
        agent.begin();
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // One for each file on its way; slow clients must not keep others waiting.
        .max_blocking_threads(256)
        // Address space only: trees of folders are walked by recursion, as deep as a path goes.
        .thread_stack_size(4 << 20)
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return println!("agentenv-agent: no runtime: {error}"),
    };
    let _ = agent.runtime.set(runtime.handle().clone());
    // Before the host can be told that we are there.
    let listener = match runtime.block_on(http::listen(listen)) {
        Ok(listener) => listener,
        Err(error) => return println!("agentenv-agent: cannot listen on {listen}: {error}"),
    };
    if agent.is_container() {
        std::thread::spawn(sudo::serve);
    }
    if let Some(port) = port {
        let agent = Arc::clone(&agent);
        std::thread::spawn(move || control::serve(&port, &agent));
    }
    if let Err(error) = runtime.block_on(http::serve(listener, agent)) {
        println!("agentenv-agent: cannot serve {listen}: {error}");
    }
}
