//! Which chunks one request fetches.

use std::collections::HashMap;

use agentenv_blocks::layer::Layer;
use agentenv_blocks::Id;

use crate::fetch::Wanted;

/// Stored bytes asked for at once: more is asked for side by side.
const MOST_AT_ONCE: u64 = 2 << 20;
/// Bytes nobody asked for that are fetched rather than asking twice.
const GAP: u64 = 64 << 10;
/// Where a chunk ends in its pack.
pub fn end_of(places: &Layer, chunk: u32) -> u64 {
    places.place(chunk).offset + u64::from(places.entry(chunk).stored)
}

/// Parts that one request each can fetch: of one pack, near each other, in order.
pub fn groups(places: &Layer, wanted: Vec<Wanted>) -> Vec<Vec<Wanted>> {
    let mut by_pack: HashMap<Id, Vec<Wanted>> = HashMap::new();
    for one in wanted {
        by_pack
            .entry(places.place(one.chunk).pack)
            .or_default()
            .push(one);
    }
    let mut groups: Vec<Vec<Wanted>> = Vec::new();
    for mut of_pack in by_pack.into_values() {
        of_pack.sort_by_key(|one| places.place(one.chunk).offset);
        let (mut begin, mut behind) = (0, None);
        for one in of_pack {
            let at = places.place(one.chunk).offset;
            let end = end_of(places, one.chunk);
            let near = behind.is_some_and(|behind: u64| {
                at <= behind.saturating_add(GAP) && end - begin <= MOST_AT_ONCE
            });
            match groups.last_mut().filter(|_| near) {
                Some(group) => group.push(one),
                None => {
                    begin = at;
                    groups.push(vec![one]);
                }
            }
            behind = Some(behind.unwrap_or(0).max(end));
        }
    }
    groups
}
