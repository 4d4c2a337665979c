use super::*;

fn noise(seed: u64, blocks: usize) -> Vec<u8> {
    let parts = (0..).map(|n: u64| Id::of(&(seed << 32 | n).to_le_bytes()).0);
    parts.flatten().take(blocks * BLOCK).collect()
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn whole(blocks: usize) -> [Span; 1] {
    [Span {
        first: 0,
        count: blocks as u32,
        offset: Some(0),
    }]
}

fn nothing_known(ids: &[Id]) -> io::Result<Vec<Known>> {
    Ok(vec![None; ids.len()])
}

fn write_all(bytes: &[u8], cut: Cut) -> (Written, Vec<u8>) {
    let mut pack = Vec::new();
    let blocks = bytes.len() / BLOCK;
    let spans = whole(blocks);
    let written = write(
        &file(bytes),
        blocks as u32,
        &spans,
        cut,
        nothing_known,
        &mut pack,
    )
    .unwrap();
    (written, pack)
}

/// The flat content of a layer whose chunks all lie in one pack.
fn read(layer: &Layer, pack: &[u8]) -> Vec<u8> {
    let mut flat = vec![0; layer.blocks() as usize * BLOCK];
    for number in 0..layer.chunk_count() {
        let entry = layer.entry(number);
        let at = layer.place(number).offset as usize;
        let mut plain = vec![0; entry.bytes()];
        chunk::decode(entry, &pack[at..at + entry.stored as usize], &mut plain).unwrap();
        let mut rest = &plain[..];
        for (first, count) in layer.runs(layer.begin(number), entry.blocks.into()) {
            let (part, more) = rest.split_at(count as usize * BLOCK);
            flat[first as usize * BLOCK..][..part.len()].copy_from_slice(part);
            rest = more;
        }
    }
    flat
}

#[test]
fn content_reads_back_however_cut() {
    let mut bytes = noise(1, 300);
    bytes[10 * BLOCK..150 * BLOCK].fill(0);
    bytes[200 * BLOCK..201 * BLOCK].fill(0);
    for cut in [Cut::Content, Cut::Fixed(16), Cut::Fixed(1)] {
        let (written, pack) = write_all(&bytes, cut);
        assert_eq!(read(&written.layer, &pack), bytes, "{cut:?}");
        assert_eq!(written.layer.data_blocks(), 159);
        assert_eq!(written.fresh, 159 * BLOCK as u64);
    }
}

#[test]
fn equal_input_gives_equal_bytes() {
    let bytes = noise(2, 500);
    let (one, two) = (
        write_all(&bytes, Cut::Content),
        write_all(&bytes, Cut::Content),
    );
    assert_eq!(one.0.layer, two.0.layer);
    assert_eq!(one.1, two.1);
}

#[test]
fn what_repeats_is_stored_once() {
    let part = noise(3, 200);
    let bytes = [&part[..], &part[..]].concat();
    let (written, pack) = write_all(&bytes, Cut::Content);
    assert_eq!(read(&written.layer, &pack), bytes);
    assert!(written.fresh < 300 * BLOCK as u64, "{}", written.fresh);
}

#[test]
fn shifted_content_is_mostly_known() {
    let part = noise(4, 2000);
    let (first, _) = write_all(&part, Cut::Content);
    let bytes = [&noise(5, 3)[..], &part[..]].concat();
    let blocks = bytes.len() / BLOCK;
    let known = |ids: &[Id]| {
        let layer = &first.layer;
        let chunk = |id: &Id| (0..layer.chunk_count()).find(|n| layer.entry(*n).id == *id);
        Ok(ids
            .iter()
            .map(|id| chunk(id).map(|n| (*layer.entry(n), layer.place(n))))
            .collect())
    };
    let mut pack = Vec::new();
    let spans = whole(blocks);
    let second = write(
        &file(&bytes),
        blocks as u32,
        &spans,
        Cut::Content,
        known,
        &mut pack,
    )
    .unwrap();
    assert!(second.fresh < 100 * BLOCK as u64, "{}", second.fresh);
    assert_eq!(second.layer.packs().len(), 2);
}

#[test]
fn fixed_chunks_keep_their_places_whatever_is_between() {
    let bytes = noise(6, 64);
    let (full, _) = write_all(&bytes, Cut::Fixed(16));
    let mut holed = bytes.clone();
    holed[20 * BLOCK..22 * BLOCK].fill(0);
    let (less, _) = write_all(&holed, Cut::Fixed(16));
    let ids = |w: &Written| (0..4).map(|n| w.layer.entry(n).id).collect::<Vec<_>>();
    let (full, less) = (ids(&full), ids(&less));
    assert_eq!((full[0], full[2], full[3]), (less[0], less[2], less[3]));
    assert_ne!(full[1], less[1]);
}

#[test]
fn spans_come_from_anywhere() {
    let bytes = noise(7, 20);
    let spans = [
        Span {
            first: 5,
            count: 4,
            offset: Some(10 * BLOCK as u64),
        },
        Span {
            first: 100,
            count: 2,
            offset: Some(0),
        },
    ];
    let mut pack = Vec::new();
    let written = write(
        &file(&bytes),
        200,
        &spans,
        Cut::Fixed(16),
        nothing_known,
        &mut pack,
    )
    .unwrap();
    let flat = read(&written.layer, &pack);
    assert_eq!(flat[5 * BLOCK..9 * BLOCK], bytes[10 * BLOCK..14 * BLOCK]);
    assert_eq!(flat[100 * BLOCK..102 * BLOCK], bytes[..2 * BLOCK]);
    let (short, spans) = (
        file(&bytes),
        [Span {
            first: 0,
            count: 21,
            offset: Some(0),
        }],
    );
    assert!(write(
        &short,
        200,
        &spans,
        Cut::Fixed(16),
        nothing_known,
        Vec::new()
    )
    .is_err());
}

#[test]
fn zeroes_need_no_source() {
    let spans = [
        Span {
            first: 3,
            count: 2,
            offset: None,
        },
        Span {
            first: 5,
            count: 1,
            offset: Some(0),
        },
    ];
    let cut = Cut::Fixed(16);
    let source = file(&noise(8, 1));
    let written = write(&source, 9, &spans, cut, nothing_known, Vec::new()).unwrap();
    let found: Vec<_> = written
        .layer
        .extents()
        .iter()
        .map(|e| (e.first, e.count, e.zero))
        .collect();
    assert_eq!(found, [(3, 2, true), (5, 1, false)]);
}

#[test]
fn nothing_is_a_layer_too() {
    let (written, _) = write_all(&vec![0; 50 * BLOCK], Cut::Content);
    assert!(written.pack.is_none());
    assert_eq!(written.layer.blocks(), 50);
    assert_eq!(
        Layer::decode(&written.layer.encode()).unwrap(),
        written.layer
    );
}
