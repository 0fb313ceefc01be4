//! The disk links, against a source that checks every byte: random extents, faults, slow and
//! reordered reads, wake-ups, ends of files and of links.

use crate::link_support::{Bad, Case, KINDS, temp_file};
use moeba::experts::disk::link::open;
use moeba::experts::disk::{Files, IoKind};
use moeba::machine::disk_probe::{Probe, probe};
use std::io;
use std::time::{Duration, Instant};

const PAGE: usize = 4096;

#[test]
fn random_extents_arrive_whole() {
    for kind in KINDS {
        for depth in [1, 3, 32] {
            let case = Case::new(3_000_017);
            let source = case.source(case.random_reads(400, 7));
            case.serve(kind, depth, &source);
            source.expect_all_right();
            assert!(source.max_out() <= 2 * depth, "{} reads out", source.max_out());
        }
    }
}

#[test]
fn a_read_may_end_with_the_file() {
    for kind in KINDS {
        let n_bytes = 5 * PAGE + 100;
        let case = Case::new(n_bytes);
        // The last page is there by 100 bytes; a second read needs not even those.
        let reads =
            vec![case.read(0, 4 * PAGE, 2 * PAGE, PAGE + 100), case.read(1, 0, 8 * PAGE, 5)];
        let source = case.source(reads);
        case.serve(kind, 4, &source);
        source.expect_all_right();
    }
}

#[test]
fn a_file_truncated_meanwhile_fails_the_read_in_a_sentence() {
    for kind in KINDS {
        let case = Case::new(64 * PAGE);
        let reads = vec![case.read(0, 0, 8 * PAGE, 8 * PAGE)];
        let source = case.source(reads);
        let link = case.open(kind, 4, source.clone());
        link.wake();
        source.wait_all();
        case.file.as_file().set_len(10 * PAGE as u64 + 7).unwrap();
        source.add(vec![case.read(1, 8 * PAGE, 8 * PAGE, 8 * PAGE), case.read(2, 0, PAGE, PAGE)]);
        source.add(vec![case.read(3, 40 * PAGE, 8 * PAGE, 8 * PAGE)]);
        link.wake();
        source.wait_all();
        source.close(link);
        for id in [1, 3] {
            let error = source.result(id).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
            let text = error.to_string();
            let path = case.file.path().display().to_string();
            assert!(text.contains(&path) && text.contains("ends at byte 40967"), "{text}");
            assert!(text.contains("truncated"), "{text}");
        }
        source.result(0).unwrap();
        source.result(2).unwrap();
    }
}

#[test]
fn an_error_that_passes_is_tried_again() {
    for kind in KINDS {
        for (bad, times) in [(Bad::Eio, 1), (Bad::Eio, 3), (Bad::Eintr, 50), (Bad::Eagain, 50)] {
            let case = Case::new(1_000_000).with_fault(bad, times);
            let source = case.source(case.random_reads(40, 3));
            case.serve(kind, 8, &source);
            source.expect_all_right();
        }
    }
}

#[test]
fn an_error_that_stays_names_file_offset_and_cause() {
    for kind in KINDS {
        let case = Case::new(100 * PAGE).with_fault(Bad::Eio, u32::MAX);
        let source = case.source(vec![case.read(0, 7 * PAGE, 2 * PAGE, 5000)]);
        case.serve(kind, 8, &source);
        let text = source.result(0).unwrap_err().to_string();
        let path = case.file.path().display();
        let expected = format!("{path}: reading 5000 bytes at offset {}: ", 7 * PAGE);
        assert!(text.starts_with(&expected) && text.contains("os error 5"), "{text}");
    }
}

#[test]
fn interruptions_without_end_are_reported() {
    for kind in KINDS {
        let case = Case::new(100 * PAGE).with_fault(Bad::Eintr, u32::MAX);
        let source = case.source(vec![case.read(0, 0, PAGE, PAGE)]);
        case.serve(kind, 1, &source);
        assert_eq!(source.result(0).unwrap_err().kind(), io::ErrorKind::Interrupted);
    }
}

#[test]
fn short_reads_go_on_where_they_ended() {
    for kind in KINDS {
        let case = Case::new(2_000_000).with_fault(Bad::Short, 6);
        let source = case.source(case.random_reads(100, 11));
        case.serve(kind, 8, &source);
        source.expect_all_right();
    }
}

#[test]
fn a_slow_read_holds_up_no_other() {
    for kind in KINDS {
        let case = Case::new(1_000_000).with_delay(|id| match id {
            0 => Duration::from_millis(400),
            _ => Duration::from_millis(u64::from(id) * 7 % 5),
        });
        let source = case.source(case.random_reads(60, 5));
        case.serve(kind, 4, &source);
        source.expect_all_right();
        assert_eq!(source.order().last(), Some(&0), "{kind}: all others overtake it");
    }
}

#[test]
fn a_disk_that_takes_100_ms_a_read_is_waited_for_in_parallel() {
    for kind in KINDS {
        let case = Case::new(1_000_000).with_delay(|_| Duration::from_millis(100));
        let source = case.source(case.random_reads(32, 5));
        let start = Instant::now();
        case.serve(kind, 32, &source);
        source.expect_all_right();
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(100), "{kind}: {took:?}");
        assert!(took < Duration::from_millis(2500), "{kind}: {took:?}");
    }
}

#[test]
fn no_wake_up_is_lost() {
    for kind in KINDS {
        let case = Case::new(1_000_000);
        let source = case.source(Vec::new());
        let link = case.open(kind, 4, source.clone());
        let mut seed = 1u32;
        for id in 0..4000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            source.add(vec![case.read(id % 8, (id as usize % 100) * PAGE, PAGE, PAGE)]);
            link.wake();
            source.wait_all();
            // Around the time that the link's thread takes to fall asleep again.
            match seed >> 30 {
                0 => {}
                1 => (0..seed >> 20 & 1023).for_each(|_| std::hint::spin_loop()),
                2 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(u64::from(seed >> 22 & 63))),
            }
        }
        source.close(link);
        source.expect_all_right();
    }
}

#[test]
fn many_callers_wake_one_link() {
    for kind in KINDS {
        let case = Case::new(1_000_000);
        let source = case.source(Vec::new());
        let link = case.open(kind, 4, source.clone());
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (case, source, link) = (&case, &source, &link);
                scope.spawn(move || {
                    for i in 0..500 {
                        source.add(vec![case.read(thread, (i % 200) * PAGE, PAGE, PAGE)]);
                        link.wake();
                        source.wait_for(thread);
                    }
                });
            }
        });
        source.close(link);
        source.expect_all_right();
    }
}

#[test]
fn closing_waits_for_reads_on_their_way() {
    for kind in KINDS {
        // All 32 reads, four at a time, take 2 s.
        let case = Case::new(1_000_000).with_delay(|_| Duration::from_millis(250));
        let source = case.source(case.random_reads(32, 5));
        let link = case.open(kind, 4, source.clone());
        link.wake();
        while source.n_handed_out() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        source.close(link);
        let (out, ended) = (source.n_handed_out(), source.order().len());
        assert!((1..=8).contains(&out), "{kind}: {out}");
        assert_eq!(out, ended, "{kind}: every read that was handed out has ended");
    }
    // One that was never used, and one of a source that was closed before.
    for kind in KINDS {
        let case = Case::new(PAGE);
        let source = case.source(Vec::new());
        let link = case.open(kind, 4, source.clone());
        source.close(link);
        source.close(case.open(kind, 4, source.clone()));
    }
}

#[test]
fn shared_memory_files_are_read_too() {
    let Ok(file) = temp_file(Some("/dev/shm".as_ref()), 300 * PAGE + 9) else {
        eprintln!("skipped: no /dev/shm here");
        return;
    };
    for kind in KINDS {
        let case = Case::of(file.reopen().unwrap(), file.path(), 300 * PAGE + 9);
        let source = case.source(case.random_reads(60, 2));
        case.serve(kind, 8, &source);
        source.expect_all_right();
    }
}

/// Pages of the file that the page cache holds.
#[cfg(target_os = "linux")]
fn cached_pages(file: &std::fs::File) -> usize {
    // SAFETY: the file is this test's own and keeps its length.
    let map = unsafe { memmap2::Mmap::map(file) }.unwrap();
    let mut pages = vec![0u8; map.len().div_ceil(PAGE)];
    // SAFETY: the map is there, and `pages` has a byte for each of its pages.
    let rc = unsafe { libc::mincore(map.as_ptr() as *mut _, map.len(), pages.as_mut_ptr()) };
    assert_eq!(rc, 0);
    pages.iter().filter(|&&page| page & 1 == 1).count()
}

#[cfg(target_os = "linux")]
#[test]
fn reads_through_the_page_cache_leave_it() {
    for kind in KINDS {
        let mut case = Case::new(400 * PAGE);
        case.cached = true;
        assert!(!case.files().is_direct(0));
        // The writing itself has filled the cache.
        let advice = rustix::fs::Advice::DontNeed;
        rustix::fs::fadvise(case.file.as_file(), 0, None, advice).unwrap();
        if cached_pages(case.file.as_file()) > 0 {
            eprintln!("skipped: this file system keeps its files in memory");
            return;
        }
        // One read at a time: pages that another read is using stay.
        let reads = (0..6).map(|id| case.read(id, id as usize * 64 * PAGE, 64 * PAGE, 1));
        let source = case.source(reads.collect());
        case.serve(kind, 1, &source);
        source.expect_all_right();
        // Pages may be larger than ours, and one at an edge stay.
        let cached = cached_pages(case.file.as_file());
        assert!(cached <= 40, "{kind}: {cached} of 400 pages are cached");
    }
}

#[test]
fn a_path_that_names_another_file_by_now_does_not_matter() {
    for kind in KINDS {
        let case = Case::new(40 * PAGE);
        std::fs::remove_file(case.file.path()).unwrap();
        std::fs::write(case.file.path(), vec![0xee; 40 * PAGE]).unwrap();
        let source = case.source(case.random_reads(20, 2));
        case.serve(kind, 8, &source);
        source.expect_all_right();
    }
}

#[test]
fn the_probe_measures_something() {
    let case = Case::new(4_000_000);
    for kind in KINDS {
        let time = Duration::from_millis(50);
        let ask = Probe { kind, read_bytes: 16 * PAGE, depth: 4, time, seed: 1 };
        let rate = probe(case.files(), &ask).unwrap();
        assert!(rate.bytes >= 16 * PAGE as u64 && rate.seconds >= 0.05, "{rate:?}");
        assert!(rate.gb_per_second() > 0.0);
        let too_large = Probe { read_bytes: 1000 * PAGE, ..ask };
        assert!(probe(case.files(), &too_large).unwrap_err().to_string().contains("smaller"));
    }
}

#[test]
fn kinds_are_spelled_as_the_flag_says() {
    for (text, kind) in [("auto", IoKind::Auto), ("uring", IoKind::Uring)] {
        assert_eq!((text.parse::<IoKind>().unwrap(), kind.to_string().as_str()), (kind, text));
    }
    for (text, kind) in [("pread", IoKind::Pread), ("mmap", IoKind::Mmap)] {
        assert_eq!((text.parse::<IoKind>().unwrap(), kind.to_string().as_str()), (kind, text));
    }
    assert!("sync".parse::<IoKind>().unwrap_err().to_string().contains("expected auto"));
}

#[test]
fn without_io_uring_auto_takes_the_pool_and_uring_says_so() {
    // There is no file to register, which io_uring refuses as it refuses any other setup.
    let none = || Files::of(std::iter::empty()).unwrap();
    assert!(none().is_empty());
    let case = Case::new(PAGE);
    let source = case.source(Vec::new());
    let link = open(IoKind::Auto, none(), None, source.clone()).unwrap();
    assert_eq!(link.kind(), IoKind::Pread);
    source.close(link);
    let refused = open(IoKind::Uring, none(), None, source).err().expect("no io_uring");
    assert!(refused.to_string().starts_with("--io uring: this system refuses"), "{refused}");
}

/// Run by the next test, in a process of its own.
#[test]
#[ignore = "ends the process"]
fn a_source_that_panics() {
    let kind = std::env::var("MOEBA_TEST_LINK").unwrap().parse().unwrap();
    let case = Case::new(PAGE);
    let source = case.source(vec![case.read(0, 0, PAGE, PAGE)]);
    source.panic_at_the_end();
    let link = case.open(kind, 1, source.clone());
    link.wake();
    source.wait_all();
}

#[test]
fn a_panic_in_the_link_ends_the_process() {
    for kind in KINDS {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "link::a_source_that_panics", "--ignored", "--nocapture"]);
        let output = child.env("MOEBA_TEST_LINK", kind.to_string()).output().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(signal, Some(6), "{kind}: {:?} {text}", output.status);
        assert!(text.contains("the test's panic"), "{text}");
    }
}
