//! Slots on several nodes of memory, as a folder describes them: the same bits, and threads that
//! read on the processors of the slots' nodes. The machine that tests need not have such nodes.

use std::fs;
use std::path::Path;

use common::convert_golden;
use common::stream::*;
use moeba::engine::{EngineOptions, TestHooks};
use moeba::experts::disk::IoKind;

/// Numbers of the processors that a status of /proc allows.
fn allowed(status: &str) -> Vec<usize> {
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
    let number = |text: &str| text.trim().parse::<usize>().unwrap();
    let parts = line.trim().split(',').map(|part| part.split_once('-').unwrap_or((part, part)));
    parts.flat_map(|(first, last)| number(first)..=number(last)).collect()
}

/// Two nodes with a processor each.
fn describe(root: &Path, processors: [usize; 2]) {
    for (number, processor) in processors.into_iter().enumerate() {
        let folder = root.join(format!("node{number}"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("cpulist"), format!("{processor}\n")).unwrap();
        fs::write(folder.join("meminfo"), format!("Node {number} MemTotal: 1024 kB\n")).unwrap();
    }
}

/// The processors of this process's threads that read.
fn processors_of_readers() -> Vec<Vec<usize>> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten().map(|entry| entry.path());
    let status = |task: std::path::PathBuf| fs::read_to_string(task.join("status")).ok();
    let readers = tasks.filter_map(status).filter(|status| status.contains("moeba-pread-"));
    readers.map(|status| allowed(&status)).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn slots_on_two_nodes_are_filled_there_and_change_no_bit() {
    let all = allowed(&fs::read_to_string("/proc/self/status").unwrap());
    let [first, second, ..] = all[..] else {
        eprintln!("skipped: one processor");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let nodes = dir.path().join("nodes");
    fs::create_dir(&nodes).unwrap();
    describe(&nodes, [first, second]);
    let path = convert_golden("deepseek_v3", "q8_0", dir.path());
    let tokens = tokens(18, 1);
    let expected = in_place(&path, &tokens);
    for (io, share) in [(uring(), 0.5), (IoKind::Pread, 0.0), (IoKind::Pread, 1.0)] {
        let options = EngineOptions {
            ram: budget(&path, share),
            io,
            test: TestHooks { nodes: Some(nodes.clone()), ..Default::default() },
            ..EngineOptions::default()
        };
        let engine = load(&path, &options);
        let answer = ask(&engine, &tokens, 1).unwrap();
        assert!(answer == expected, "{io} {share}");
        expect_rest(&engine);
        if io == IoKind::Pread && share > 0.0 {
            let readers = processors_of_readers();
            // Each has read for one node, or not yet.
            let has = |processor| readers.contains(&vec![processor]);
            assert!(has(first) && has(second), "{readers:?}");
        }
    }
}
