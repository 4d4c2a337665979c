//! One request under way: counted from its head to the last byte of its answer.

use std::sync::Arc;

use crate::activity::Activity;
use crate::client::Client;
use crate::cut::{Cut, Source};
use crate::table::Link;

/// Holds a request's place in the accounts; dropped when its answer has ended, however.
#[derive(Debug)]
pub struct Flight {
    client: Arc<Client>,
    activity: Arc<Activity>,
    /// Its connection carries other requests as well.
    shares: bool,
    enlisted: Option<(Arc<Link>, usize)>,
}

/// The route was dropped meanwhile.
#[derive(Debug)]
pub struct Gone;

impl Flight {
    pub fn begin(client: Arc<Client>, activity: Arc<Activity>, shares: bool) -> Self {
        client.begin();
        activity.begin();
        Self {
            client,
            activity,
            shares,
            enlisted: None,
        }
    }

    /// From here on what is sent to the client ends when the route does.
    pub fn bind(&mut self, link: &Arc<Link>, source: &Arc<Source>) -> Result<(), Gone> {
        let cut = if self.shares {
            Cut::Stream(Arc::clone(source))
        } else {
            Cut::Connection(Arc::clone(&self.client))
        };
        let key = link.enlist(cut).ok_or(Gone)?;
        self.enlisted = Some((Arc::clone(link), key));
        Ok(())
    }

    pub fn sent_in(&self, bytes: usize) {
        self.activity.sent_in(bytes);
    }

    pub fn sent_out(&self, bytes: usize) {
        self.activity.sent_out(bytes);
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if let Some((link, key)) = self.enlisted.take() {
            link.discharge(key);
        }
        self.activity.end();
        self.client.end();
    }
}
