//! Files that the writer made once: what it makes now, and what they mean, is still the same.
//!
//! A change of the format needs a new version; another zstd may compress otherwise, which readers do
//! not mind. In both cases `AENV_GOLDEN=write cargo test -p agentenv-blocks --test golden` makes them anew.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use agentenv_blocks::chunk;
use agentenv_blocks::cut::Cut;
use agentenv_blocks::layer::Layer;
use agentenv_blocks::pack;
use agentenv_blocks::write::{write, Span};
use agentenv_blocks::{stack, Id, BLOCK};

const BLOCKS: u32 = 70;

fn place(name: &str) -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/layers");
    root.join(name)
}

/// Block n: from 64 on noise, else by n modulo 5 one byte repeated, 32 bytes repeated, zeroes.
fn block(number: u32) -> Vec<u8> {
    let digest = |part: u32| Id::of(&[number, part].map(u32::to_le_bytes).concat()).0;
    match number % 5 {
        _ if number >= 64 => (0..BLOCK as u32 / 32).flat_map(digest).collect(),
        0 => vec![number as u8 + 1; BLOCK],
        4 if number < 30 => vec![0; BLOCK],
        _ => digest(0).repeat(BLOCK / 32),
    }
}

/// Blocks 2 to 40 and 50 to the end, in chunks of 16 blocks.
fn written() -> (Vec<u8>, Vec<u8>) {
    let mut source = tempfile::tempfile().expect("a file");
    (0..BLOCKS).for_each(|number| source.write_all(&block(number)).expect("room"));
    let spans = [(2, 39), (50, 20)].map(|(first, count)| Span {
        first,
        count,
        offset: u64::from(first) * BLOCK as u64,
    });
    let mut pack = Vec::new();
    let known = |ids: &[Id]| Ok(vec![None; ids.len()]);
    let made = write(&source, BLOCKS, &spans, Cut::Fixed(16), known, &mut pack).expect("a layer");
    (made.layer.encode(), pack)
}

/// Names are part of the format: of the layer, and of the stack that is the layer alone.
fn names(layer: &Layer) -> String {
    let id = layer.id();
    format!("{id}\n{}\n", stack::id(BLOCKS, &[(id, 0)]))
}

#[test]
fn the_writer_makes_the_same_bytes() {
    let (table, pack) = written();
    let names = names(&Layer::decode(&table).expect("a layer"));
    let made = [
        ("table", table),
        ("pack", pack),
        ("names", names.into_bytes()),
    ];
    for (name, bytes) in made {
        if std::env::var_os("AENV_GOLDEN").is_some() {
            fs::write(place(name), &bytes).expect("room");
        }
        assert!(
            fs::read(place(name)).expect("it") == bytes,
            "another {name}"
        );
    }
}

#[test]
fn they_mean_the_same() {
    let (table, pack) = (place("table"), place("pack"));
    let (table, pack) = (fs::read(table).expect("it"), fs::read(pack).expect("it"));
    let layer = Layer::decode(&table).expect("a layer");
    assert_eq!(layer.encode(), table);
    assert_eq!(layer.packs(), [Id::of(&pack)]);
    let footer = &pack[pack.len() - pack::FOOTER..];
    let (at, length) = pack::directory_range(pack.len() as u64, footer).expect("a footer");
    let listed = pack::directory(footer, &pack[at as usize..][..length as usize]);
    assert_eq!(
        listed.expect("a directory").len(),
        layer.chunk_count() as usize
    );
    let mut flat = vec![0; BLOCKS as usize * BLOCK];
    for number in 0..layer.chunk_count() {
        let (entry, at) = (layer.entry(number), layer.place(number).offset as usize);
        let mut plain = vec![0; entry.bytes()];
        chunk::decode(entry, &pack[at..][..entry.stored as usize], &mut plain).expect("a chunk");
        let mut rest = &plain[..];
        for (first, count) in layer.runs(layer.begin(number), entry.blocks.into()) {
            let (part, more) = rest.split_at(count as usize * BLOCK);
            flat[first as usize * BLOCK..][..part.len()].copy_from_slice(part);
            rest = more;
        }
    }
    for number in 0..BLOCKS {
        let held = (2..41).contains(&number) || number >= 50;
        let wanted = if held { block(number) } else { vec![0; BLOCK] };
        assert!(
            flat[number as usize * BLOCK..][..BLOCK] == wanted,
            "block {number}"
        );
    }
}
