//! The self-test compares every kernel with its twin on the CPU; here on the emulated device, under
//! several orders of streams, blocks and warps. It finds nothing there, and something where a
//! device is lost. The kernels that have run belong to the process.

use moeba::backend::gpu::Emulated;
use moeba::backend::gpu::emulated::{Config, Faults, Queues};
use moeba::backend::selftest;
use moeba::backend::selftest::{Extent, Outcome, Report, Row};

fn report(config: &Config, extent: Extent) -> Report {
    let device = Emulated::devices(config).swap_remove(0);
    selftest::run(&device, extent, &mut |_| Ok(())).unwrap()
}

fn expect_clean(seed: u64, extent: Extent) {
    // Rows of 256 elements take more shared memory than Turing has.
    let config = Config { seed, shared_bytes_max: 96 << 10, ..Config::default() };
    let report = report(&config, extent);
    let bad: Vec<_> = report.rows.iter().filter(|row| !row.outcome.is_good()).collect();
    assert!(report.is_clean(), "seed {seed}: {bad:#?}");
    assert!(report.rows.len() > 150, "{}", report.rows.len());
    // All but tensor cores.
    let near = report.rows.iter().filter(|row| matches!(row.outcome, Outcome::Within { .. }));
    let kernels: Vec<&str> = near.map(|row| row.kernel.as_str()).collect();
    let expected = [
        ("matmul_halves", 2),
        ("attention_prompt", 9),
        ("expand", 7),
        ("attention_pieces", 1),
        ("expert_halves", 2),
    ];
    let expected = expected.into_iter().flat_map(|(name, n)| [name].repeat(n));
    assert_eq!(kernels, expected.collect::<Vec<_>>());
}

#[test]
fn the_emulated_device_is_clean() {
    expect_clean(3, Extent::Quick);
    // No kernel is left out, on no extent.
    let ran = Emulated::launched_kernels();
    let is_left_out = |name: &String| !name.starts_with("probe_") && !ran.contains(name);
    let left_out: Vec<_> = Emulated::kernel_names().into_iter().filter(is_left_out).collect();
    assert!(left_out.is_empty(), "no check runs {left_out:?}");
    std::thread::scope(|scope| {
        for seed in [0, 11] {
            scope.spawn(move || expect_clean(seed, Extent::Odd));
        }
    });
}

/// Graphs, streams and waits, on whatever hardware queues; where streams share one, none waits.
#[test]
fn the_machinery_is_clean() {
    for queues in Queues::ALL {
        for seed in 0..4 {
            let config = Config { seed, queues, waits: None, ..Config::default() };
            let device = Emulated::devices(&config).swap_remove(0);
            let report = selftest::machinery(&device, Extent::Quick).unwrap();
            assert!(report.is_clean(), "{queues:?}, seed {seed}: {:#?}", report.rows);
            let is_left_out = |row: &&Row| matches!(row.outcome, Outcome::LeftOut(_));
            let n_left_out = report.rows.iter().filter(is_left_out).count();
            assert_eq!(n_left_out, usize::from(queues == Queues::One));
        }
    }
}

#[test]
fn a_device_that_is_lost_fails_what_comes_after() {
    let faults = Faults { lost_at_op: Some(100), ..Faults::default() };
    let report = report(&Config { faults, ..Config::default() }, Extent::Quick);
    assert!(!report.is_clean());
    let failed = |outcome: &Outcome| matches!(outcome, Outcome::Failed(_));
    let first = report.rows.iter().position(|row| failed(&row.outcome)).unwrap();
    assert!(first > 0 && report.rows[first..].iter().all(|row| failed(&row.outcome)));
}
