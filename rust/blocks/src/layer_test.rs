use super::*;
use proptest::prelude::*;

fn entry(number: u8, blocks: u16) -> (Entry, Place) {
    let id = Id([number; 32]);
    let entry = Entry::new(id, u32::from(blocks) * 4096, blocks, 0).unwrap();
    let place = Place {
        pack: Id([number / 2; 32]),
        offset: u64::from(number) << 20,
    };
    (entry, place)
}

fn sample() -> Layer {
    let extents = vec![
        (0, 3, false),
        (3, 2, true),
        (10, 5, false),
        (15, 1, true),
        (16, 4, false),
    ];
    Layer::new(100, extents, &[entry(1, 2), entry(2, 4), entry(3, 6)]).unwrap()
}

#[test]
fn it_reads_back() {
    let layer = sample();
    assert_eq!(Layer::decode(&layer.encode()).unwrap(), layer);
    assert_eq!(layer.data_blocks(), 12);
    assert_eq!(layer.packs().len(), 2);
}

#[test]
fn chunks_and_runs_are_found() {
    let layer = sample();
    let chunks: Vec<u32> = (0..12).map(|data| layer.chunk_at(data)).collect();
    assert_eq!(chunks, [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]);
    assert_eq!(
        layer.runs(0, 12).collect::<Vec<_>>(),
        [(0, 3), (10, 5), (16, 4)]
    );
    assert_eq!(layer.runs(2, 4).collect::<Vec<_>>(), [(2, 1), (10, 3)]);
    assert_eq!(layer.runs(8, 1).collect::<Vec<_>>(), [(16, 1)]);
    assert_eq!(layer.runs(11, 1).collect::<Vec<_>>(), [(19, 1)]);
}

#[test]
fn where_chunks_lie_does_not_name_it() {
    let layer = sample();
    let moved: Vec<(Entry, Place)> = (0..3)
        .map(|n| {
            (
                *layer.entry(n),
                Place {
                    pack: Id([9; 32]),
                    offset: 0,
                },
            )
        })
        .collect();
    let extents = layer
        .extents()
        .iter()
        .map(|e| (e.first, e.count, e.zero))
        .collect();
    assert_eq!(Layer::new(100, extents, &moved).unwrap().id(), layer.id());
}

#[test]
fn what_does_not_fit_is_refused() {
    let chunks = [entry(1, 2)];
    for extents in [
        vec![(0, 3, false)],
        vec![(0, 0, true), (0, 2, false)],
        vec![(99, 2, false)],
        vec![(u32::MAX, 2, false)],
        vec![(5, 1, false), (5, 1, false)],
        vec![(5, 1, false), (4, 1, false)],
        vec![(0, 2, true)],
    ] {
        assert!(
            Layer::new(100, extents.clone(), &chunks).is_err(),
            "{extents:?}"
        );
    }
}

proptest! {
    #[test]
    fn damage_is_found(at in 0usize..2000, bit in 0u8..8) {
        let whole = sample().encode();
        let mut bytes = whole.clone();
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        prop_assert!(Layer::decode(&bytes).is_err());
        prop_assert!(Layer::decode(&whole[..at]).is_err());
    }

    /// Sealed anew, so that the checks behind the checksum are reached.
    #[test]
    fn hostile_tables_do_no_harm(body in proptest::collection::vec(any::<u8>(), 0..400)) {
        let mut bytes = sample().encode();
        let at = 12.min(body.len());
        let end = bytes.len() - 32;
        bytes.truncate(end);
        for (n, byte) in body.iter().enumerate() {
            let place = (at + n * 7) % end;
            bytes[place] = *byte;
        }
        if let Ok(layer) = Layer::decode(&seal(bytes)) {
            let _ = layer.runs(0, layer.data_blocks()).count();
        }
    }
}
