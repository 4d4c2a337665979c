//! `GET /changes`: what the sandbox's disk has over its image, an entry a line (JSON). Ours, not
//! E2B's.

use std::io::{BufWriter, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use hyper::body::Incoming;
use hyper::header::CONTENT_TYPE;
use hyper::{Request, Response, StatusCode};
use tokio::sync::mpsc;

use super::archive::{permit, Out, CHUNK, QUEUE};
use super::connect::channel_body;
use super::{error, query, Answer};
use crate::fs::changes::Walk;
use crate::state::{Agent, Layers};

/// With `digests=true` each file has its SHA-256, which takes as long as to read them all.
pub async fn get(agent: &Agent, request: &Request<Incoming>) -> Answer {
    let digests = query(request, "digests").is_some_and(|value| value == "true");
    let Layers { disk, image } = match agent.layers() {
        Ok(layers) => layers,
        Err(_) => {
            let why = "gVisor does not keep apart what has changed: start it with the engine qemu";
            return error(StatusCode::NOT_IMPLEMENTED, why);
        }
    };
    let (sender, receiver) = mpsc::channel(QUEUE);
    let permit = permit().await;
    tokio::task::spawn_blocking(move || {
        let _permit = permit;
        let mut out = BufWriter::with_capacity(CHUNK, Out(sender.clone()));
        // No path leads to either any more, but what we hold open.
        let place = |fd: i32| PathBuf::from(format!("/proc/self/fd/{fd}"));
        let walk = Walk {
            upper: &place(disk.as_raw_fd()).join("upper"),
            image: &place(image.as_raw_fd()).join(Path::new("")),
            digests,
        };
        let told = walk.tell(&mut |change| {
            serde_json::to_writer(&mut out, change)?;
            out.write_all(b"\n")
        });
        if let Err(failure) = told.and_then(|()| out.flush()) {
            let _ = sender.blocking_send(Err(failure)); // cuts the stream: it is not whole
        }
    });
    let mut answer = Response::new(channel_body(receiver));
    let kind = "application/x-ndjson".parse().expect("static");
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}
