//! The library: every element compiles, the eleven of the specification's table begin an iteration
//! every cycle, and their results are those of independent oracles.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

use beeline_ir::interpreter::Frame;
use beeline_ir::library;
use beeline_ir::run::{Interpreter, Machine};
use beeline_ir::tree::Element;
use beeline_nf::load::compile;
use beeline_passes::{Options, hardware};
use beeline_syntax::ast::Storage;

fn elements() -> Vec<Element> {
    let mut all = Vec::new();
    for (name, text) in library::files() {
        let loaded = compile(name, text.to_owned(), None);
        let shown = loaded.diagnostics.render(&loaded.sources);
        assert!(!loaded.diagnostics.failed(), "{shown}");
        all.extend(loaded.compiled.elements);
    }
    all
}

fn element(name: &str) -> Element {
    elements().into_iter().find(|element| element.name == name).unwrap()
}

const ELEVEN: [&str; 11] = [
    "L4_Parser",
    "IPChecksum",
    "NVGRE_Encap",
    "AES_CTR",
    "SHA1",
    "CuckooHash",
    "HashTCAM",
    "LPM_Tree",
    "FlowCache",
    "SRPrioQueue",
    "RateLimiter",
];

#[test]
fn the_eleven_begin_an_iteration_every_cycle_and_naively_they_do_not() {
    let all = elements();
    assert!(all.len() >= 31, "{} elements", all.len());
    let mut wrong = Vec::new();
    for name in ELEVEN {
        let element = all.iter().find(|element| element.name == name).unwrap();
        let optimised = hardware(element, &Options::default()).unwrap().report;
        let naive = hardware(element, &Options::naive()).unwrap();
        let turns: u64 = {
            let mut turns = 1;
            beeline_ir::tree::walk(&naive.element.handler, &mut |stmt| {
                if let beeline_ir::tree::Stmt::Loop { info, .. } = stmt {
                    turns += u64::from(info.bound.unwrap_or(1));
                }
            });
            turns
        };
        let naive_cycles = u64::from(naive.report.interval) * turns;
        println!(
            "{name}: II {} depth {} longest {} ps, naive {naive_cycles} cycles, limit {:?}",
            optimised.interval, optimised.depth, optimised.longest_ps, optimised.limit
        );
        if optimised.interval != 1 || naive_cycles <= 1 {
            wrong.push(name);
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn every_element_becomes_hardware() {
    for element in elements() {
        let report = hardware(&element, &Options::default()).unwrap().report;
        println!("{}: II {} depth {}", element.name, report.interval, report.depth);
        // Board memory answers late, and an answer decides what is written.
        let board = element.mems.iter().any(|mem| mem.storage == Storage::Global);
        let most = if board { 40 } else { 4 };
        assert!(report.interval <= most, "{}: {:?}", element.name, report.limit);
    }
}

/// Sends items through one element; what its first output gave.
fn through(element: &Element, frame: &mut Frame, item: &[u64]) -> Vec<u64> {
    frame.var_mut(element, element.in_data[0]).copy_from_slice(item);
    frame.set_low(element.in_valid[0], 1);
    Interpreter.handler(element, frame, &mut Vec::new()).unwrap();
    assert_eq!(frame.low(element.out_set[0]), 1);
    frame.var(element, element.out_data[0]).to_vec()
}

fn signal(element: &Element, frame: &mut Frame, command: u64, parameters: &[u64]) -> Vec<u64> {
    let words = frame.var_mut(element, element.sig_in);
    words.fill(0);
    words[0] = command << 16;
    words[1..=parameters.len()].copy_from_slice(parameters);
    Interpreter.signal(element, frame, &mut Vec::new()).unwrap();
    frame.var(element, element.sig_out)[1..].to_vec()
}

fn started(element: &Element) -> Frame {
    let mut frame = Frame::new(element);
    Interpreter.init(element, &mut frame).unwrap();
    frame
}

#[test]
fn sha1_gives_the_digest_of_the_standard() {
    let element = element("SHA1");
    let mut frame = started(&element);
    // "abc", padded: FIPS 180-4's example.
    let h = [0x6745_2301_u32, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476, 0xc3d2_e1f0];
    let mut w = [0_u32; 16];
    w[0] = 0x6162_6380;
    w[15] = 24;
    let all: Vec<u32> = h.into_iter().chain(w).collect();
    let mut item = vec![0_u64; 11];
    for (at, word) in all.iter().enumerate() {
        item[at / 2] |= u64::from(*word) << (32 * (at % 2));
    }
    let out = through(&element, &mut frame, &item);
    let digest: Vec<u32> = (0..5)
        .map(|at| (out[at / 2] >> (32 * (at % 2)) & 0xffff_ffff).try_into().unwrap())
        .collect();
    assert_eq!(digest, [0xa999_3e36, 0x4706_816a, 0xba3e_2571, 0x7850_c26c, 0x9cd0_d89d]);
}

#[test]
fn aes_ctr_gives_the_ciphertext_of_the_standard() {
    let element = element("AES_CTR");
    let mut frame = started(&element);
    // NIST SP 800-38A, F.5.1; round keys from FIPS 197, A.1.
    let keys: [[u32; 4]; 11] = [
        [0x2b7e1516, 0x28aed2a6, 0xabf71588, 0x09cf4f3c],
        [0xa0fafe17, 0x88542cb1, 0x23a33939, 0x2a6c7605],
        [0xf2c295f2, 0x7a96b943, 0x5935807a, 0x7359f67f],
        [0x3d80477d, 0x4716fe3e, 0x1e237e44, 0x6d7a883b],
        [0xef44a541, 0xa8525b7f, 0xb671253b, 0xdb0bad00],
        [0xd4d1c6f8, 0x7c839d87, 0xcaf2b8bc, 0x11f915bc],
        [0x6d88a37a, 0x110b3efd, 0xdbf98641, 0xca0093fd],
        [0x4e54f70e, 0x5f5fc9f3, 0x84a64fb2, 0x4ea6dc4f],
        [0xead27321, 0xb58dbad2, 0x312bf560, 0x7f8d292f],
        [0xac7766f3, 0x19fadc21, 0x28d12941, 0x575c006e],
        [0xd014f9a8, 0xc9ee2589, 0xe13f0cc8, 0xb6630ca6],
    ];
    let pair = |a: u32, b: u32| (u64::from(a) << 32 | u64::from(b)).swap_bytes();
    for (round, key) in (0_u64..).zip(keys) {
        signal(&element, &mut frame, 1, &[round, pair(key[0], key[1]), pair(key[2], key[3])]);
    }
    signal(&element, &mut frame, 2, &[0, pair(0xf0f1_f2f3, 0xf4f5_f6f7)]);
    let plain = [pair(0x6bc1_bee2, 0x2e40_9f96), pair(0xe93d_7e11, 0x7393_172a)];
    let item = [plain[0], plain[1], 0xf8f9_fafb_fcfd_feff];
    let out = through(&element, &mut frame, &item);
    assert_eq!(out[0], pair(0x874d_6191, 0xb620_e326), "{out:x?}");
    assert_eq!(out[1], pair(0x1bef_6864, 0x990d_b6ce));
}

#[test]
fn the_priority_queue_is_a_sorted_list() {
    let element = element("SRPrioQueue");
    let mut frame = started(&element);
    let mut oracle: Vec<(u64, u64)> = Vec::new();
    let mut seed = 1_u64;
    for id in 0..2_000_u64 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let (enqueue, dequeue, priority) =
            (seed >> 60 & 3 != 0, seed >> 58 & 3 == 0, seed >> 40 & 63);
        let item =
            [u64::from(enqueue) | u64::from(dequeue) << 1 | priority << 2 | id << 34, id >> 30];
        let out = through(&element, &mut frame, &item);
        let bits = |from: u32, count| beeline_ir::interpreter::extract(&out, from, count);
        if dequeue {
            let first = (!oracle.is_empty()).then(|| oracle.remove(0));
            assert_eq!(bits(0, 1) == 1, first.is_some());
            if let Some((priority, id)) = first {
                assert_eq!((bits(2, 32), bits(34, 32)), (priority, id));
            }
        }
        if enqueue {
            let at = oracle.partition_point(|(p, _)| *p <= priority);
            oracle.insert(at, (priority, id));
            let dropped = (oracle.len() > 32).then(|| oracle.pop()).flatten();
            assert_eq!(bits(1, 1) == 1, dropped.is_some());
            if let Some((_, id)) = dropped {
                assert_eq!(bits(66, 32), id);
            }
        }
    }
    assert!(oracle.len() > 8, "the queue was not exercised");
}

#[test]
fn the_checksum_is_the_one_the_header_needs() {
    let element = element("IPChecksum");
    let mut frame = started(&element);
    for size in [60_usize, 64, 200, 1_514] {
        let mut packet: Vec<u8> = (0..size).map(|at| (at * 37 + size).to_le_bytes()[0]).collect();
        packet[12..15].copy_from_slice(&[8, 0, 0x45]);
        let mut joiner = beeline_ir::flits::Joiner::default();
        let mut result = None;
        let mut flits = Vec::new();
        beeline_ir::flits::split(&packet, 0, |flit| flits.push(Some(flit)));
        flits.push(None);
        for flit in flits {
            frame.set_low(element.in_valid[0], u64::from(flit.is_some()));
            if let Some(flit) = flit {
                frame.var_mut(&element, element.in_data[0]).copy_from_slice(&flit);
            }
            Interpreter.handler(&element, &mut frame, &mut Vec::new()).unwrap();
            if frame.low(element.out_set[0]) == 1 {
                let out = frame.var(&element, element.out_data[0]).to_vec();
                if let Some((bytes, _)) = joiner.push(out.as_array().unwrap()).unwrap() {
                    result = Some(bytes.to_vec());
                }
            }
        }
        let result = result.unwrap();
        let sum: u32 = result[14..34]
            .chunks(2)
            .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
            .sum();
        assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "{size} bytes");
        assert_eq!((&result[..24], &result[26..]), (&packet[..24], &packet[26..]));
    }
}

#[test]
fn nvgre_adds_forty_two_bytes_and_keeps_the_rest() {
    let element = element("NVGRE_Encap");
    let mut frame = started(&element);
    for size in 33..200_usize {
        let packet: Vec<u8> = (0..size).map(|at| (at + size).to_le_bytes()[0]).collect();
        let mut flits = std::collections::VecDeque::new();
        beeline_ir::flits::split(&packet, 0, |flit| flits.push_back(flit));
        let mut joiner = beeline_ir::flits::Joiner::default();
        let mut result = None;
        for _ in 0..40 {
            let wants = frame.low(element.next_ports) == 1 || frame.low(element.in_valid[0]) == 1;
            if frame.low(element.in_valid[0]) == 0
                && wants
                && let Some(flit) = flits.pop_front()
            {
                frame.var_mut(&element, element.in_data[0]).copy_from_slice(&flit);
                frame.set_low(element.in_valid[0], 1);
            }
            Interpreter.handler(&element, &mut frame, &mut Vec::new()).unwrap();
            if frame.low(element.out_set[0]) == 1 {
                let out = frame.var(&element, element.out_data[0]).to_vec();
                if let Some((bytes, _)) = joiner.push(out.as_array().unwrap()).unwrap() {
                    result = Some(bytes.to_vec());
                }
            }
        }
        let result = result.unwrap_or_else(|| panic!("{size} bytes gave no packet"));
        assert_eq!(result.len(), size + 42);
        assert_eq!(&result[42..], &packet[..], "{size} bytes");
        assert_eq!(&result[12..15], &[8, 0, 0x45]);
        assert_eq!(&result[34..38], &[0x20, 0, 0x65, 0x58]);
    }
}
