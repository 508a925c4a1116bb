//! Two threads and one set: what one of them does between two steps of the other is heard.
//!
//! `BEELINE_WAKE_SECONDS=n` for each test (else one; 60 with `BEELINE_DEEP=1`).

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

mod common;

use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use beeline_sockets::{connection, epoll};
use common::races::{
    Chance, close, close_sets, fresh_set, give, pair, rearm, say, take, take_all, time, watch,
};

#[test]
fn news_beside_another_report_of_an_edge_triggered_connection_is_an_edge() {
    let pair = pair();
    let (asks, hears) = (pair[0].as_raw_fd(), pair[1].as_raw_fd());
    let set = fresh_set();
    #[expect(clippy::cast_sign_loss, reason = "bits")]
    let (edge, bytes) =
        ((libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLET) as u32, libc::EPOLLIN as u32);
    let fresh = libc::epoll_event { events: edge, u64: 7 };
    assert!(epoll::control(set, libc::EPOLL_CTL_ADD, hears, Some(fresh)).unwrap().is_ok());
    let (turn, said) = (AtomicU64::new(0), AtomicU64::new(0));
    let until = Instant::now() + time();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut chance = Chance(7);
            for now in 1.. {
                while turn.load(Ordering::Acquire) < now {
                    std::hint::spin_loop();
                }
                if turn.load(Ordering::Acquire) == u64::MAX {
                    break;
                }
                (0..chance.below(40)).for_each(|_| std::hint::spin_loop());
                give(asks, b"x", 0).unwrap();
                said.store(now, Ordering::Release);
            }
        });
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
        let mut now = 0;
        let mut lost = false;
        while Instant::now() < until && !lost {
            now += 1;
            // Reports room at once, like any fresh registration.
            assert!(epoll::control(set, libc::EPOLL_CTL_MOD, hears, Some(fresh)).unwrap().is_ok());
            turn.store(now, Ordering::Release);
            loop {
                let all_said = said.load(Ordering::Acquire) == now;
                let count = epoll::wait(set, &mut events, Some(Duration::ZERO), None);
                let count = count.unwrap().unwrap();
                if events[..count].iter().any(|event| event.events & bytes != 0) {
                    break;
                }
                lost = all_said && count == 0;
                if lost {
                    break;
                }
            }
            take_all(hears, &mut [0; 1]);
        }
        turn.store(u64::MAX, Ordering::Release);
        say(&format!("{now} edges beside another report"));
        assert!(!lost, "round {now}");
    });
    close_sets(&[set]);
    close(pair);
}

#[test]
fn a_connection_taken_out_of_a_set_takes_no_wake_up_of_another_with_it() {
    let (stays, leaves) = (pair(), pair());
    let (asks, hears) = (stays[0].as_raw_fd(), stays[1].as_raw_fd());
    let (last, out) = (leaves[0].as_raw_fd(), leaves[1].as_raw_fd());
    let set = fresh_set();
    rearm(set, hears, libc::EPOLL_CTL_ADD, false);
    let (moved, done) = (AtomicU64::new(0), AtomicBool::new(false));
    let until = Instant::now() + time();
    watch("taken out beside a sleeper", 0, &moved, &done, || {
        while Instant::now() < until {
            rearm(set, out, libc::EPOLL_CTL_ADD, false);
            // Both are busy, so that one name is for both.
            for fd in [asks, last] {
                give(fd, b"x", 0).unwrap();
            }
            let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
            assert_eq!(epoll::wait(set, &mut events, None, None), Some(Ok(2)));
            for fd in [hears, out] {
                take(fd, &mut [0; 9], 0).unwrap();
            }
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
                    assert_eq!(epoll::wait(set, &mut events, None, None), Some(Ok(1)));
                    take_all(hears, &mut [0; 1]);
                });
                // Most rounds it sleeps by now.
                std::thread::sleep(Duration::from_micros(200));
                assert!(epoll::control(set, libc::EPOLL_CTL_DEL, out, None).unwrap().is_ok());
                // The bell of this one is swallowed before the sleeper comes to look at it.
                give(last, b"x", 0).unwrap();
                connection::find(out).unwrap().listen(out, 0);
                give(asks, b"x", 0).unwrap();
            });
            take_all(out, &mut [0; 1]);
            moved.fetch_add(1, Ordering::Relaxed);
        }
    });
    say(&format!("{} connections taken out beside a sleeper", moved.load(Ordering::Relaxed)));
    close_sets(&[set]);
    close(stays);
    close(leaves);
}
