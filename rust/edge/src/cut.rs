//! Ending what is open on a route that went: a whole connection, or one stream of many on it.

use std::io;
use std::sync::Arc;
use std::task::{ready, Context, Poll, Waker};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use parking_lot::Mutex;

use crate::client::Client;
use crate::upstream::Lease;

/// What is cut when the route goes, so that no reader takes what it got for the whole.
#[derive(Debug)]
pub enum Cut {
    /// HTTP/1.1: the client's connection, by a reset.
    Connection(Arc<Client>),
    /// HTTP/2: this stream only; the connection may carry those of other sandboxes.
    Stream(Arc<Source>),
}

impl Cut {
    pub fn now(&self) {
        match self {
            Self::Connection(client) => client.cut(),
            Self::Stream(source) => source.take_away(),
        }
    }
}

/// An upstream's body, and its connection until the end of that. Both can be taken from the
/// reader, even one that waits for its client.
#[derive(Debug)]
pub struct Source(Mutex<State>);

#[derive(Debug)]
struct State {
    body: Option<Incoming>,
    lease: Option<Lease>,
    reader: Option<Waker>,
}

impl Source {
    pub fn new(body: Incoming, lease: Lease) -> Self {
        let source = Self(Mutex::new(State {
            body: Some(body),
            lease: Some(lease),
            reader: None,
        }));
        source.0.lock().settle(false);
        source
    }

    /// Lets go of the upstream; the reader meets an error when it looks again.
    fn take_away(&self) {
        let mut state = self.0.lock();
        drop((state.body.take(), state.lease.take()));
        if let Some(reader) = state.reader.take() {
            reader.wake();
        }
    }

    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let mut state = self.0.lock();
        let Some(body) = &mut state.body else {
            return Poll::Ready(Some(Err(io::Error::other("the sandbox is gone"))));
        };
        let frame = std::pin::Pin::new(body).poll_frame(cx);
        match &frame {
            Poll::Pending => drop(state.reader.replace(cx.waker().clone())),
            Poll::Ready(frame) => state.settle(frame.is_none()),
        }
        Poll::Ready(ready!(frame).map(|frame| frame.map_err(io::Error::other)))
    }

    pub fn is_end_stream(&self) -> bool {
        let body = &self.0.lock().body;
        body.as_ref().is_some_and(Body::is_end_stream)
    }

    pub fn size_hint(&self) -> SizeHint {
        let body = &self.0.lock().body;
        body.as_ref().map_or_else(SizeHint::new, Body::size_hint)
    }
}

impl State {
    /// Gives the connection back once nothing more will come on it.
    fn settle(&mut self, ended: bool) {
        if ended || self.body.as_ref().is_some_and(Body::is_end_stream) {
            if let Some(lease) = self.lease.take() {
                lease.give_back();
            }
        }
    }
}
