//! Bodies on their way: frames pass one at a time, so the slower side sets the pace.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{ready, Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use crate::activity::Activity;
use crate::cut::Source;
use crate::flight::Flight;

/// A request body, counted.
#[derive(Debug)]
pub struct Upload {
    inner: Option<Incoming>,
    activity: Arc<Activity>,
}

impl Upload {
    pub fn new(inner: Incoming, activity: Arc<Activity>) -> Self {
        Self {
            inner: (!inner.is_end_stream()).then_some(inner),
            activity,
        }
    }

    pub fn without_data(&self) -> Self {
        Self {
            inner: None,
            activity: Arc::clone(&self.activity),
        }
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(inner) = &mut self.inner else {
            return Poll::Ready(None);
        };
        let frame = ready!(Pin::new(inner).poll_frame(cx));
        if let Some(Ok(data)) = frame.as_ref().map(|f| f.as_ref().map(Frame::data_ref)) {
            self.activity.sent_in(data.map_or(0, Bytes::len));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let empty = || SizeHint::with_exact(0);
        self.inner.as_ref().map_or_else(empty, Body::size_hint)
    }
}

/// A response body: our own words, or the upstream's as they come.
#[derive(Debug)]
pub enum Reply {
    Whole(Option<Bytes>),
    Stream(Box<Download>),
}

impl Reply {
    pub fn whole(body: Bytes) -> Self {
        Self::Whole((!body.is_empty()).then_some(body))
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut *self {
            Self::Whole(body) => Poll::Ready(body.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(download) => download.poll(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(body) => body.is_none(),
            Self::Stream(download) => download.source.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(body) => SizeHint::with_exact(body.as_ref().map_or(0, Bytes::len) as u64),
            Self::Stream(download) => download.source.size_hint(),
        }
    }
}

/// An upstream's body with the account of its request.
#[derive(Debug)]
pub struct Download {
    source: Arc<Source>,
    flight: Flight,
}

impl Download {
    pub fn new(source: Arc<Source>, flight: Flight) -> Self {
        Self { source, flight }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let frame = ready!(self.source.poll(cx));
        if let Some(Ok(data)) = frame.as_ref().map(|f| f.as_ref().map(Frame::data_ref)) {
            self.flight.sent_out(data.map_or(0, Bytes::len));
        }
        Poll::Ready(frame)
    }
}
