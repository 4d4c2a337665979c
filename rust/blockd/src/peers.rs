//! Other nodes' caches: asked before the store, and answered.
//!
//! `GET /chunks/<layer>/<n>,<n>,…` with `Authorization: Bearer <token>`; the answer is, for each chunk
//! that is here, its number and length (4 bytes each, little-endian) and its plain bytes. Who asks
//! verifies them, so a peer need not be trusted with more than the secret.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use agentenv_blocks::layer::Layer;
use agentenv_blocks::Id;
use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::cache::file::{buffer, Buffer};
use crate::cache::Cache;
use crate::log;

/// Peers asked for one layer: more would keep the store waiting.
const ASKED: usize = 2;
const CONNECT: Duration = Duration::from_millis(300);
const ANSWER: Duration = Duration::from_secs(3);
/// A peer that failed is left alone for so long.
const REST: Duration = Duration::from_secs(5);
/// Chunks in one answer.
const MOST_CHUNKS: usize = 64;
/// Peers' connections, which stay open between questions, and answers in the making (some MiB each).
const CONNECTIONS: usize = 1024;
const PARALLEL: usize = 16;

struct Peer {
    url: String,
    rests_until: Mutex<Option<Instant>>,
}

/// The nodes to ask.
pub struct Peers {
    peers: Vec<Peer>,
    client: Client<HttpConnector, Empty<Bytes>>,
    token: String,
}

impl Peers {
    pub fn none(&self) -> bool {
        self.peers.is_empty()
    }

    pub fn new(urls: &[String], token: Option<String>) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        let peer = |url: &String| Peer {
            url: url.trim_end_matches('/').to_owned(),
            rests_until: Mutex::default(),
        };
        Self {
            peers: urls.iter().map(peer).collect(),
            client: Client::builder(TokioExecutor::new()).build(connector),
            token: token.unwrap_or_default().trim().to_owned(),
        }
    }

    /// What peers have of these chunks, unverified.
    pub async fn fetch(&self, layer: &Layer, chunks: &[u32]) -> Vec<(u32, Buffer)> {
        let mut left: Vec<u32> = chunks.to_vec();
        let mut found = Vec::new();
        for peer in self.order(&layer.id()) {
            for part in left
                .chunks(MOST_CHUNKS)
                .map(<[u32]>::to_vec)
                .collect::<Vec<_>>()
            {
                match self.ask(peer, layer, &part).await {
                    Ok(some) => found.extend(some),
                    Err(error) => {
                        log::line(format_args!("peer {}: {error}", peer.url));
                        *peer.rests_until.lock() = Some(Instant::now() + REST);
                        break;
                    }
                }
            }
            left.retain(|chunk| !found.iter().any(|(number, _)| number == chunk));
            if left.is_empty() {
                break;
            }
        }
        found
    }

    /// Every node asks the same peers for a layer first, so that those are the ones who have it.
    fn order(&self, layer: &Id) -> Vec<&Peer> {
        let awake = |peer: &&Peer| {
            peer.rests_until
                .lock()
                .is_none_or(|until| until < Instant::now())
        };
        let mut peers: Vec<&Peer> = self.peers.iter().filter(awake).collect();
        peers.sort_by_cached_key(|peer| Id::of(format!("{layer} {}", peer.url).as_bytes()));
        peers.truncate(ASKED);
        peers
    }

    async fn get(&self, url: &str, most: usize) -> Result<Bytes, String> {
        let request = Request::get(url)
            .header("authorization", format!("Bearer {}", self.token))
            .body(Empty::new());
        let answer = self
            .client
            .request(request.map_err(|error| error.to_string())?)
            .await;
        let answer = answer.map_err(|error| error.to_string())?;
        if !answer.status().is_success() {
            return Err(format!("it answered {}", answer.status()));
        }
        let body = Limited::new(answer.into_body(), most).collect().await;
        Ok(body.map_err(|error| error.to_string())?.to_bytes())
    }

    async fn ask(
        &self,
        peer: &Peer,
        layer: &Layer,
        chunks: &[u32],
    ) -> Result<Vec<(u32, Buffer)>, String> {
        let numbers: Vec<String> = chunks.iter().map(u32::to_string).collect();
        let url = format!("{}/chunks/{}/{}", peer.url, layer.id(), numbers.join(","));
        let most: usize = chunks
            .iter()
            .map(|chunk| 8 + layer.entry(*chunk).bytes())
            .sum();
        let bytes = timeout(ANSWER, self.get(&url, most)).await;
        let bytes = bytes.map_err(|_| "it does not answer")??;
        unpack(layer, chunks, &bytes).ok_or_else(|| "its answer makes no sense".into())
    }
}

fn unpack(layer: &Layer, chunks: &[u32], mut bytes: &[u8]) -> Option<Vec<(u32, Buffer)>> {
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let (head, rest) = bytes.split_at_checked(8)?;
        let number = u32::from_le_bytes(head[..4].try_into().ok()?);
        let length = u32::from_le_bytes(head[4..].try_into().ok()?) as usize;
        let (plain, rest) = rest.split_at_checked(length)?;
        if !chunks.contains(&number) || layer.entry(number).bytes() != length {
            return None;
        }
        let mut held = buffer(length);
        held.copy_from_slice(plain);
        found.push((number, held));
        bytes = rest;
    }
    Some(found)
}

/// Answers peers at this address from now on.
pub async fn listen(address: SocketAddr, token: String, cache: Arc<Cache>) -> io::Result<()> {
    let listener = TcpListener::bind(address).await?;
    let wanted: Arc<str> = format!("Bearer {}", token.trim()).into();
    let doors = Arc::new(Semaphore::new(CONNECTIONS));
    let room = Arc::new(Semaphore::new(PARALLEL));
    tokio::spawn(async move {
        loop {
            let Ok(permit) = Arc::clone(&doors).acquire_owned().await else {
                return;
            };
            let Ok((stream, _)) = listener.accept().await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let (cache, wanted) = (Arc::clone(&cache), Arc::clone(&wanted));
            let room = Arc::clone(&room);
            tokio::spawn(async move {
                let service = service_fn(|request| answer(&cache, &wanted, &room, request));
                let mut server = hyper::server::conn::http1::Builder::new();
                server
                    .timer(hyper_util::rt::TokioTimer::new())
                    .header_read_timeout(ANSWER * 10);
                let _ = server.serve_connection(TokioIo::new(stream), service).await;
                drop(permit);
            });
        }
    });
    Ok(())
}

async fn answer(
    cache: &Arc<Cache>,
    wanted: &str,
    room: &Semaphore,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let given = request
        .headers()
        .get("authorization")
        .map_or(&b""[..], |value| value.as_bytes());
    // Digests are compared: how long that takes tells nothing of the secret.
    let (status, body) = if Id::of(given) != Id::of(wanted.as_bytes()) {
        (StatusCode::UNAUTHORIZED, Vec::new())
    } else {
        match parse(request.uri().path()) {
            Some((layer, chunks)) => {
                let _one = room.acquire().await;
                (StatusCode::OK, gather(cache, layer, chunks).await)
            }
            None => (StatusCode::BAD_REQUEST, Vec::new()),
        }
    };
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    Ok(response)
}

fn parse(path: &str) -> Option<(Id, Vec<u32>)> {
    let (layer, numbers) = path.strip_prefix("/chunks/")?.split_once('/')?;
    let chunks: Vec<u32> = numbers
        .split(',')
        .map(str::parse)
        .collect::<Result<_, _>>()
        .ok()?;
    (chunks.len() <= MOST_CHUNKS).then_some((layer.parse().ok()?, chunks))
}

async fn gather(cache: &Arc<Cache>, layer: Id, chunks: Vec<u32>) -> Vec<u8> {
    let cache = Arc::clone(cache);
    let work = move || {
        let Some(file) = cache.borrow_layer(&layer) else {
            return Vec::new();
        };
        let mut out = Vec::new();
        for chunk in chunks {
            if chunk >= file.layer().chunk_count() {
                continue;
            }
            let Some(plain) = file.load(chunk) else {
                continue;
            };
            out.extend_from_slice(&chunk.to_le_bytes());
            out.extend_from_slice(&(plain.len() as u32).to_le_bytes());
            out.extend_from_slice(&plain);
        }
        cache.release(&file);
        out
    };
    spawn_blocking(work).await.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use agentenv_blocks::chunk;
    use agentenv_blocks::layer::Place;

    fn layer() -> Layer {
        let place = Place {
            pack: Id([0; 32]),
            offset: 0,
        };
        let plain = [7; 8192];
        let entry = chunk::encode(Id::of(&plain), &plain).0;
        Layer::new(6, vec![(0, 6, false)], &[(entry, place); 3]).expect("a layer")
    }

    fn part(number: u32, length: u32) -> Vec<u8> {
        let head = [number.to_le_bytes(), length.to_le_bytes()].concat();
        [head, vec![7; length as usize]].concat()
    }

    #[test]
    fn an_answer_holds_what_was_asked_for_or_nothing() {
        let layer = layer();
        let both = [part(0, 8192), part(2, 8192)].concat();
        let found = unpack(&layer, &[0, 2], &both).expect("an answer");
        assert_eq!(found.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [0, 2]);
        assert_eq!(unpack(&layer, &[0], &[]).map(|found| found.len()), Some(0));
        for wrong in [part(1, 8192), part(9, 8192), part(0, 4096), part(0, 0)] {
            assert!(unpack(&layer, &[0, 2], &wrong).is_none());
        }
        for end in 1..8 {
            assert!(unpack(&layer, &[0], &both[..end * 1000]).is_none());
        }
    }

    #[test]
    fn a_question_is_understood_or_refused() {
        let id = Id::of(b"a");
        let path = format!("/chunks/{id}/1,22,333");
        assert_eq!(parse(&path), Some((id, vec![1, 22, 333])));
        let many = format!("/chunks/{id}/{}1", "1,".repeat(MOST_CHUNKS));
        for wrong in ["", "/", "/chunks", "/chunks/x/1", &path[..70], &many] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
        for numbers in ["", ",", "1,", "-1", "4294967296", "1/2", "%31"] {
            assert_eq!(parse(&format!("/chunks/{id}/{numbers}")), None, "{numbers}");
        }
    }
}
