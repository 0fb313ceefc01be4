//! Findings as a table.

use super::advice::{self, Advice};
use super::examine::{DeviceFinding, DiskFinding, Findings};
use crate::engine::device;
use crate::experts::numa::Node;
use crate::machine::{DeviceRates, ExpertTransfers, Rounds};
use crate::units::size;

pub fn of(found: &Findings) -> String {
    let mut lines = Vec::new();
    processor(found, &mut lines);
    memory(found, &mut lines);
    disk(&found.disk, &mut lines);
    let uring = match &found.io_uring {
        Ok(()) => "usable".into(),
        Err(why) => format!("not usable: {why}"),
    };
    lines.push(line("io_uring", &uring));
    let gpu = match (&found.gpu.driver, &found.gpu.libcuda) {
        (None, None) => "none".into(),
        (driver, library) => {
            let library = library.as_ref().map(|path| path.display().to_string());
            let or = |text: Option<&str>, otherwise: &str| text.unwrap_or(otherwise).to_owned();
            let library = or(library.as_deref(), "no libcuda");
            format!("{}; {library}", or(driver.as_deref(), "no kernel module"))
        }
    };
    lines.push(line("GPU driver", &gpu));
    devices(&found.devices, &mut lines);
    let limit = found.open_files_limit.map_or("none".into(), |n| n.to_string());
    lines.push(line("open files", &limit));
    advice_lines(&advice::of(found), &mut lines);
    lines.join("\n")
}

/// After the findings: what to change, a line each.
fn advice_lines(advice: &[Advice], out: &mut Vec<String>) {
    out.push(String::new());
    match advice {
        [] => out.push("nothing to change on this machine".into()),
        some => {
            out.extend(some.iter().map(|a| line(a.about, &format!("{}: {}", a.why, a.command))))
        }
    }
}

fn line(what: &str, text: &str) -> String {
    format!("{what:<16} {text}").trim_end().to_owned()
}

fn processor(found: &Findings, out: &mut Vec<String>) {
    let name = match found.processor.name.as_str() {
        "" => std::env::consts::ARCH,
        name => name,
    };
    let cores = found.n_logical_cores;
    out.push(line("processor", &format!("{name}, {cores} logical cores")));
    out.push(line("", &found.processor.features.join(" ")));
    out.push(line("kernels", found.kernels));
    for (at, (peak, n_threads, rounds)) in found.peaks.iter().enumerate() {
        let rate = rate(rounds, "GOP/s", *n_threads);
        let text = format!("{rate}  {} ({})", peak.unit, peak.instructions);
        out.push(line(if at == 0 { "integer peak" } else { "" }, &text));
    }
}

fn memory(found: &Findings, out: &mut Vec<String>) {
    let or_unknown = |bytes: Option<u64>| bytes.map_or("?".into(), size);
    let (total, available) = (found.memory.total_bytes, found.available_bytes);
    let text = format!("{}, {} available", or_unknown(total), or_unknown(available));
    out.push(line("memory", &text));
    nodes(&found.nodes, out);
    let limit = found.group_limit_bytes.map_or("none".into(), size);
    out.push(line("cgroup limit", &limit));
    let swap = found.memory.swap_bytes.map_or("?".into(), |total| {
        let used = total.saturating_sub(found.memory.swap_free_bytes.unwrap_or(total));
        if total == 0 { "none".into() } else { format!("{}, {} in use", size(total), size(used)) }
    });
    out.push(line("swap", &swap));
    let transparent = found.memory.transparent_huge_pages.as_deref().unwrap_or("none");
    let (n, bytes) = (found.memory.n_huge_pages, found.memory.huge_page_bytes);
    let text = format!("transparent: {transparent}; {n} of {} set aside", or_unknown(bytes));
    out.push(line("huge pages", &text));
    match &found.read_rates {
        Err(why) => out.push(line("memory read", why)),
        Ok(rates) => out.extend(rates.iter().enumerate().map(|(at, (n_threads, rounds))| {
            line(if at == 0 { "memory read" } else { "" }, &rate(rounds, "GB/s", *n_threads))
        })),
    }
}

/// Nothing where the system names none.
fn nodes(nodes: &[Node], out: &mut Vec<String>) {
    for (at, node) in nodes.iter().enumerate() {
        let processors = match node.processors.len() {
            0 => "no processors".into(),
            1 => "1 processor".into(),
            n => format!("{n} processors"),
        };
        let text = format!("{}: {}, {processors}", node.number, size(node.memory_bytes));
        out.push(line(if at == 0 { "memory nodes" } else { "" }, &text));
    }
}

fn disk(disk: &DiskFinding, out: &mut Vec<String>) {
    let (path, disk) = match disk {
        Ok(found) => found,
        Err(why) => return out.push(line("disk", &format!("not measured: {why}"))),
    };
    let unsteady = if disk.gb_per_second.is_steady() { "" } else { " (unsteady)" };
    let reads = format!("reads of {}, {} at once, {}", size_of(disk), disk.depth, disk.io);
    let text = format!("{:.2} GB/s{unsteady}  {reads}", disk.gb_per_second.median());
    out.push(line("disk", &text));
    let direct = match disk.is_direct {
        true => "past the page cache",
        false => "through the page cache: no disk was measured",
    };
    out.push(line("", &format!("{:.0} µs for one of 4 KiB; {direct}", disk.latency_us)));
    out.push(line("", &path.display().to_string()));
}

fn devices(devices: &DeviceFinding, out: &mut Vec<String>) {
    let found = match devices {
        Ok(found) => found,
        Err(why) => return out.push(line("GPU", &format!("not measured: {why}"))),
    };
    found.rates.iter().for_each(|rates| device_lines(rates, out));
    if found.are_emulated {
        out.push(line("", "emulated, for tests: its rates mean nothing"));
    }
}

fn device_lines(rates: &DeviceRates, out: &mut Vec<String>) {
    let (info, memory) = (&rates.info, &rates.memory);
    let (name, multiprocessors) = (device::name(info), info.multiprocessors);
    let (compute, cuda) = (info.compute, info.driver);
    let text = format!(
        "{name}, compute capability {compute}, {multiprocessors} multiprocessors, CUDA {cuda}"
    );
    out.push(line("GPU", &text));
    let bytes = |bytes: usize| size(bytes as u64);
    let peak = match info.memory_bytes_per_second {
        0 => String::new(),
        peak => format!("; {:.1} GB/s by its clock", peak as f64 / 1e9),
    };
    let (total, free) = (bytes(memory.total_bytes), bytes(memory.free_bytes));
    out.push(line("GPU memory", &format!("{total}, {free} free{peak}")));
    let gb = |rounds: &Rounds| format!("{:.1} GB/s", rounds.median());
    let link = format!(
        "up {} from pinned memory, {} write-combined; down {}",
        gb(&rates.up),
        gb(&rates.up_write_combined),
        gb(&rates.down)
    );
    out.push(line("GPU link", &link));
    let ExpertTransfers { in_place, read, chunked, whole, pageable } = &rates.experts;
    let in_place = in_place
        .as_ref()
        .map_or("cannot be pinned in place".into(), |rate| format!("{} pinned in place", gb(rate)));
    let read = read.as_ref().map_or(String::new(), |rate| format!(", {} read there", gb(rate)));
    let experts = format!(
        "{in_place}{read}, {} in chunks through pinned memory, {} whole, {} from pageable memory",
        gb(chunked),
        gb(whole),
        gb(pageable)
    );
    out.push(line("GPU experts", &experts));
    let percent = |part: f64| format!("{:.0} %", 100.0 * part);
    let of_memory = |rounds: &Rounds| {
        let part = rates.of_memory(rounds.median());
        part.map_or(String::new(), |part| format!(", {} of its memory", percent(part)))
    };
    out.push(line("GPU copy", &format!("{}{}", gb(&rates.copy), of_memory(&rates.copy))));
    let of_copy = percent(rates.matvec.median() / rates.copy.median());
    let (rate, of_memory) = (gb(&rates.matvec), of_memory(&rates.matvec));
    out.push(line("GPU matvec", &format!("q4_k: {rate}, {of_copy} of the copy rate{of_memory}")));
    let tops = rates.matmul_tops.median();
    let of_peak = rates.int8_peak_tops().map_or(String::new(), |peak| {
        format!(", {} of the {peak:.0} of int8 by its clock", percent(tops / peak))
    });
    out.push(line("GPU matmul", &format!("q4_k: {tops:.1} TOP/s{of_peak}")));
}

fn size_of(disk: &crate::machine::disk::Disk) -> String {
    size(disk.read_bytes as u64)
}

fn rate(rounds: &Rounds, unit: &str, n_threads: usize) -> String {
    let threads = if n_threads == 1 { "1 thread".into() } else { format!("{n_threads} threads") };
    let unsteady = match rounds.is_steady() {
        true => String::new(),
        false => format!(", unsteady: best {:.1}", rounds.best()),
    };
    format!("{:.1} {unit}, {threads}{unsteady}", rounds.median())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_named_one_below_the_other() {
        let node = |number, n: usize| Node {
            number,
            processors: (0..n).collect(),
            memory_bytes: 64 << 30,
        };
        let mut lines = Vec::new();
        nodes(&[node(0, 16), node(1, 1), node(4, 0)], &mut lines);
        let expected = [
            "memory nodes     0: 64.00 GiB, 16 processors",
            "                 1: 64.00 GiB, 1 processor",
            "                 4: 64.00 GiB, no processors",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn rates_say_when_they_are_not_to_be_trusted() {
        let steady = Rounds::sorted(vec![17.0, 17.5, 17.9]);
        assert_eq!(rate(&steady, "GB/s", 2), "17.5 GB/s, 2 threads");
        let busy = Rounds::sorted(vec![5.0, 9.0, 17.9]);
        assert_eq!(rate(&busy, "GB/s", 1), "9.0 GB/s, 1 thread, unsteady: best 17.9");
    }
}
