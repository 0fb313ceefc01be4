//! How many threads compute on the CPU.

/// The threads that are asked for, with a warning where there are fewer cores: threads wait for
/// each other several times a layer.
pub fn threads(asked: Option<usize>) -> usize {
    let n = asked.unwrap_or_else(default_threads);
    let n_cores = std::thread::available_parallelism().map_or(n, |n| n.get());
    if n > n_cores {
        let cores = if n_cores == 1 { "core" } else { "cores" };
        log::warn!(
            "-t {n}: this machine has {n_cores} {cores}; more threads than cores are slower, \
             because they wait for each other"
        );
    }
    n
}

/// One thread a physical core: a second one on the same core shares the units that the kernels
/// keep busy.
pub fn default_threads() -> usize {
    let logical = std::thread::available_parallelism().map_or(1, |n| n.get());
    let siblings =
        std::fs::read_to_string("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list");
    match siblings {
        Ok(list) if list.trim().contains([',', '-']) => (logical / 2).max(1),
        _ => logical,
    }
}
