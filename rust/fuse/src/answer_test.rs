use super::*;
use crate::protocol::HEADER_LEN;
use crate::{Opened, ReadReply};

struct Two;

impl Files for Two {
    fn lookup(&self, name: &[u8]) -> Option<Attr> {
        self.list()
            .into_iter()
            .find(|(n, _)| n == name)
            .map(|f| f.1)
    }

    fn attr(&self, node: u64) -> Option<Attr> {
        self.list()
            .into_iter()
            .map(|f| f.1)
            .find(|a| a.node == node)
    }

    fn list(&self) -> Vec<(Vec<u8>, Attr)> {
        let file = |name: &[u8], node, size| (name.to_vec(), Attr { node, size });
        let mut all = vec![file(b"bigger", 9, 5000), file(b"a", 2, 1)];
        all.extend([
            file(b"", 3, 0),
            file(b"x/y", 4, 0),
            file(&[b'l'; 256], 5, 0),
        ]);
        all
    }

    fn open(&self, node: u64) -> Result<Opened, Errno> {
        let passthrough = (node == 9).then_some(7);
        Ok(Opened { passthrough })
    }

    fn release(&self, _: u64) {}

    fn read(&self, _: u64, _: u64, _: u32, _: ReadReply) {}
}

fn ask(opcode: u32, node: u64, body: &[u8]) -> Answer {
    let header = Header {
        opcode,
        node,
        ..Header::default()
    };
    answer(&Two, &header, Body(body))
}

fn bytes(answer: Answer) -> Vec<u8> {
    answer.ok().flatten().expect("an answer").0
}

fn names(listing: &[u8]) -> Vec<(Vec<u8>, u64)> {
    let mut rest = Body(listing);
    let mut names = vec![];
    while !rest.0.is_empty() {
        let (position, length) = (rest.u64(8).unwrap(), rest.u32(16).unwrap() as usize);
        names.push((rest.0[24..24 + length].to_vec(), position));
        rest = Body(&rest.0[24 + length.next_multiple_of(8)..]);
    }
    names
}

fn listing(after: u64, room: u32) -> Vec<(Vec<u8>, u64)> {
    let body = Packed::default().u64(0).u64(after).u32(room).zeroes(20);
    names(&bytes(ask(opcode::READDIR, ROOT, &body.0)))
}

#[test]
fn replies_have_the_sizes_of_the_header_file() {
    assert_eq!(bytes(ask(opcode::LOOKUP, ROOT, b"a\0")).len(), 128);
    assert_eq!(bytes(ask(opcode::GETATTR, 2, &[0; 16])).len(), 104);
    assert_eq!(bytes(ask(opcode::GETATTR, ROOT, &[0; 16])).len(), 104);
    assert_eq!(bytes(ask(opcode::OPEN, 2, &[0; 8])).len(), 16);
    assert_eq!(bytes(ask(opcode::OPENDIR, ROOT, &[0; 8])).len(), 16);
    assert_eq!(bytes(ask(opcode::STATFS, ROOT, &[])).len(), 80);
    assert_eq!(
        init(Body(&[7, 0, 0, 0].repeat(16)))
            .ok()
            .map(|i| i.1 .0.len()),
        None
    );
    let modern = Packed::default()
        .u32(7)
        .u32(45)
        .u32(0)
        .u32(1 << 30)
        .u32(0xa0);
    let (with, out) = init(Body(&modern.zeroes(44).0)).unwrap_or_else(|_| panic!());
    assert_eq!(out.0.len(), 64);
    assert!(with.passthrough() && with.resend() && with.minor == MINOR);
}

#[test]
fn an_old_kernel_is_told_no_and_has_no_passthrough() {
    let older = |minor| Packed::default().u32(7).u32(minor).u32(0).u32(1).0;
    assert!(matches!(init(Body(&older(27))), Err(Errno::PROTO)));
    let (with, _) = init(Body(&older(31))).unwrap_or_else(|_| panic!());
    assert!(!with.passthrough() && !with.resend() && with.minor == 31);
    assert!(matches!(init(Body(&[7, 0])), Err(Errno::INVAL)));
}

#[test]
fn whatever_is_cut_off_is_an_error_or_an_answer_never_a_panic() {
    for opcode in 0..4200 {
        for length in 0..48 {
            for node in [0, 1, 2, 9, u64::MAX] {
                let _ = ask(opcode, node, &vec![0xff; length]);
                let _ = ask(opcode, node, &vec![0; length]);
            }
        }
    }
    for length in 0..100 {
        assert_eq!(
            Header::parse(&vec![1; length]).is_some(),
            length >= HEADER_LEN
        );
        let _ = init(Body(&vec![7; length]));
        let _ = read_range(&Two, 9, Body(&vec![0xff; length]));
    }
}

#[test]
fn a_name_without_end_or_of_no_file_is_refused() {
    assert!(matches!(ask(opcode::LOOKUP, ROOT, b"a"), Err(Errno::INVAL)));
    assert!(matches!(
        ask(opcode::LOOKUP, ROOT, b"b\0"),
        Err(Errno::NOENT)
    ));
    assert!(matches!(ask(opcode::LOOKUP, 2, b"a\0"), Err(Errno::NOTDIR)));
    assert!(matches!(
        ask(opcode::GETATTR, 77, &[0; 16]),
        Err(Errno::STALE)
    ));
}

#[test]
fn writers_are_refused_and_unknown_requests_are_not_implemented() {
    for flags in [libc::O_WRONLY, libc::O_RDWR, libc::O_TRUNC] {
        let body = Packed::default().u32(flags as u32).u32(0);
        assert!(matches!(ask(opcode::OPEN, 2, &body.0), Err(Errno::ROFS)));
    }
    assert!(matches!(
        ask(opcode::UNLINK, ROOT, b"a\0"),
        Err(Errno::ROFS)
    ));
    for unknown in [22, 23, 25, 34, 46, 52, 4096] {
        assert!(matches!(ask(unknown, 2, &[0; 64]), Err(Errno::NOSYS)));
    }
    assert!(matches!(ask(opcode::BATCH_FORGET, 0, &[]), Ok(None)));
}

#[test]
fn opens_say_how_they_are_read() {
    let cached = bytes(ask(opcode::OPEN, 2, &[0; 8]));
    assert_eq!(
        (cached[8], cached[12]),
        ((FOPEN_KEEP_CACHE | FOPEN_NOFLUSH) as u8, 0)
    );
    let through = bytes(ask(opcode::OPEN, 9, &[0; 8]));
    assert_eq!(
        (through[8], through[12]),
        ((FOPEN_PASSTHROUGH | FOPEN_NOFLUSH) as u8, 7)
    );
}

#[test]
fn a_listing_goes_on_where_it_stopped_and_leaves_out_what_cannot_be_said() {
    let all = listing(0, 4096);
    let only: Vec<&[u8]> = all.iter().map(|(name, _)| &name[..]).collect();
    assert_eq!(only, [&b"."[..], b"..", b"a", b"bigger"]);
    let (mut after, mut seen) = (0, vec![]);
    while let [(name, position)] = &listing(after, 32)[..] {
        seen.push(name.clone());
        after = *position;
    }
    assert_eq!(seen, only);
}

#[test]
fn reads_are_cut_at_the_end_of_the_file() {
    let range = |offset, size| {
        let body = Packed::default().u64(0).u64(offset).u32(size).zeroes(20);
        read_range(&Two, 9, Body(&body.0)).unwrap()
    };
    assert_eq!(range(0, 4096), (0, 4096));
    assert_eq!(range(4096, 4096), (4096, 904));
    assert_eq!(range(5000, 4096).1, 0);
    assert_eq!(range(u64::MAX, u32::MAX).1, 0);
}
