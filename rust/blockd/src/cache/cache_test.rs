use super::*;
use agentenv_blocks::chunk::{self, Entry};
use agentenv_blocks::layer::Place;
use agentenv_blocks::BLOCK;

const CHUNKS: u32 = 8;
const BLOCKS: u16 = 4;
const CHUNK: u64 = BLOCKS as u64 * BLOCK as u64;

fn plain(layer: u8, chunk: u32) -> Buffer {
    let mut made = file::buffer(CHUNK as usize);
    made.fill(layer);
    made[0] = chunk as u8;
    made
}

fn layer(number: u8) -> Layer {
    let place = Place {
        pack: Id([0; 32]),
        offset: 0,
    };
    let one = |chunk| {
        let plain = plain(number, chunk);
        let (entry, _): (Entry, _) = chunk::encode(Id::of(&plain), &plain);
        (entry, place)
    };
    let chunks: Vec<(Entry, Place)> = (0..CHUNKS).map(one).collect();
    let blocks = CHUNKS * u32::from(BLOCKS);
    // A hole in the midst of a chunk.
    let extents = vec![(0, 6, false), (8, blocks - 6, false)];
    Layer::new(blocks + 2, extents, &chunks).expect("a layer")
}

struct Scratch(tempfile::TempDir);

impl Scratch {
    fn new() -> Self {
        Self(tempfile::tempdir_in("/var/tmp").expect("a folder"))
    }

    fn cache(&self, chunks: u64) -> Cache {
        let bounds = Bounds {
            size: chunks * CHUNK,
            free: 0,
        };
        let (dir, spare) = (self.0.path().join("cache"), self.0.path().join("spare"));
        Cache::open(dir, spare, bounds).expect("a cache")
    }
}

fn opened(cache: &Cache, number: u8) -> Arc<LayerFile> {
    let table = layer(number);
    cache
        .keep_table(&table.id(), &table.encode())
        .expect("room");
    cache.acquire(table).expect("a file")
}

fn fill(cache: &Cache, file: &LayerFile, number: u8, chunks: std::ops::Range<u32>) {
    for chunk in chunks {
        cache.store(file, chunk, &plain(number, chunk));
    }
}

fn held(file: &LayerFile) -> Vec<u32> {
    (0..CHUNKS).filter(|chunk| file.has(*chunk)).collect()
}

fn read(file: &LayerFile, chunk: u32) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    let first = file.layer().begin(chunk);
    for (block, count) in file.layer().runs(first, u32::from(BLOCKS)) {
        let data = first + (out.len() / BLOCK) as u32;
        let mut part = file::buffer(count as usize * BLOCK);
        file.read(block, data, &mut part).then_some(())?;
        out.extend_from_slice(&part);
    }
    Some(out)
}

#[test]
fn what_is_stored_is_read_and_found_again() {
    let place = Scratch::new();
    let cache = place.cache(100);
    let file = opened(&cache, 1);
    fill(&cache, &file, 1, 0..CHUNKS);
    assert_eq!(cache.bytes(), u64::from(CHUNKS) * CHUNK);
    for chunk in 0..CHUNKS {
        assert_eq!(read(&file, chunk).as_deref(), Some(&plain(1, chunk)[..]));
    }
    cache.release(&file);
    drop(cache);
    let cache = place.cache(100);
    assert_eq!(cache.bytes(), u64::from(CHUNKS) * CHUNK);
    let file = cache.borrow_layer(&layer(1).id()).expect("it is here");
    assert!(held(&file).is_empty()); // nobody has verified them
    assert!((0..CHUNKS).all(|chunk| file.load(chunk).is_some()));
    file.settle().expect("room");
    assert!(file.whole().is_some());
}

#[test]
fn closed_layers_go_first_in_the_order_of_their_closing() {
    let place = Scratch::new();
    let cache = place.cache(24);
    for number in [1, 2, 3] {
        let file = opened(&cache, number);
        fill(&cache, &file, number, 0..CHUNKS);
        cache.release(&file);
    }
    cache.release(&opened(&cache, 1)); // used again
    let file = opened(&cache, 4);
    fill(&cache, &file, 4, 0..1);
    let here = |number| cache.borrow_layer(&layer(number).id()).is_some();
    assert!(!here(2) && here(1) && here(3));
    assert!(cache.bytes() <= 24 * CHUNK);
}

#[test]
fn of_open_layers_unused_chunks_go_and_none_of_pinned_ones() {
    let place = Scratch::new();
    let cache = place.cache(12);
    let (pinned, open) = (opened(&cache, 1), opened(&cache, 2));
    pinned.pin();
    fill(&cache, &pinned, 1, 0..CHUNKS);
    fill(&cache, &open, 2, 0..4);
    (0..4).for_each(|chunk| assert_eq!(open.evict(chunk), 0)); // the hand passes them once
    assert!(read(&open, 2).is_some());
    fill(&cache, &open, 2, 4..5);
    assert_eq!(held(&pinned).len(), CHUNKS as usize);
    assert_eq!(held(&open), [2, 3, 4]); // one for the new one, one for the next
    open.pin();
    fill(&cache, &open, 2, 5..7);
    assert_eq!(held(&open), [2, 3, 4, 5]);
    assert_eq!(cache.counters.unkept.load(Ordering::Relaxed), 1);
    open.unpin();
    fill(&cache, &open, 2, 6..7);
    assert!(open.has(6));
    assert!(cache.bytes() <= 12 * CHUNK);
}

#[test]
fn a_discarded_chunk_is_not_punched_out_under_the_kernel() {
    let place = Scratch::new();
    let cache = place.cache(100);
    let file = opened(&cache, 1);
    fill(&cache, &file, 1, 0..CHUNKS);
    file.settle().expect("room");
    let mut before = file::buffer(BLOCK);
    let whole = file.whole().expect("whole").try_clone().expect("a handle");
    file.discard(0);
    assert!(
        file.whole().is_none()
            && !file.has(0)
            && !mark_of(&cache.path(&layer(1).id(), "data")).exists()
    );
    std::os::unix::fs::FileExt::read_exact_at(&whole, &mut before, 0).expect("data");
    assert_eq!(before[..], plain(1, 0)[..BLOCK]);
    fill(&cache, &file, 1, 0..1);
    file.settle().expect("room");
    assert!(file.whole().is_some());
}

#[test]
fn a_layer_opened_twice_is_counted_once() {
    let place = Scratch::new();
    let cache = place.cache(100);
    let (one, two) = (opened(&cache, 1), opened(&cache, 1));
    assert!(Arc::ptr_eq(&one, &two));
    fill(&cache, &one, 1, 0..2);
    cache.rescan(false).expect("a folder");
    assert_eq!(cache.bytes(), 2 * CHUNK);
    cache.release(&one);
    assert_eq!(cache.open_layers(), 1);
    cache.release(&two);
    assert_eq!((cache.open_layers(), cache.bytes()), (0, 2 * CHUNK));
}

#[test]
fn a_table_without_room_is_spared_while_the_layer_is_open() {
    let place = Scratch::new();
    let cache = place.cache(100);
    let table = layer(1);
    let path = cache.path(&table.id(), "table");
    fs::create_dir_all(&path).expect("in its way");
    cache
        .keep_table(&table.id(), &table.encode())
        .expect("the spare place");
    let file = cache.acquire(table.clone()).expect("a file");
    assert_eq!(cache.table(&table.id()), Some(table.encode()));
    cache.release(&file);
    assert_eq!(cache.table(&table.id()), None);
}
