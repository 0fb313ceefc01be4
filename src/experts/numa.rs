//! Nodes of memory (NUMA): each has memory and the processors that are near to it. On a machine
//! with several, slots are spread over them, and a thread that fills a slot runs on a processor of
//! the slot's node (MoE-Infinity, section 6).

use super::memory::Region;
use std::fs;
use std::path::Path;

/// The system's description of the nodes.
pub const SYSFS: &str = "/sys/devices/system/node";

/// More than any processor's or node's number.
const MAX_NUMBER: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub number: usize,
    /// Numbers of its processors; none if it is memory alone.
    pub processors: Vec<usize>,
    pub memory_bytes: u64,
}

/// All nodes, by number. Those whose description makes no sense are left out; none where the
/// system describes none.
pub fn nodes(root: &Path) -> Vec<Node> {
    let names = fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let number = |name: &str| name.strip_prefix("node")?.parse().ok().filter(|n| *n < MAX_NUMBER);
    let numbers = names.filter_map(|name| number(name.to_str()?));
    let mut nodes: Vec<Node> = numbers.filter_map(|number| node(root, number)).collect();
    nodes.sort_by_key(|node| node.number);
    nodes.dedup_by_key(|node| node.number);
    nodes
}

fn node(root: &Path, number: usize) -> Option<Node> {
    let folder = root.join(format!("node{number}"));
    let processors = processors(&fs::read_to_string(folder.join("cpulist")).ok()?)?;
    let meminfo = fs::read_to_string(folder.join("meminfo")).ok()?;
    // `Node 0 MemTotal:       16384 kB`
    let total = meminfo.lines().find_map(|line| line.split_once("MemTotal:"))?.1;
    let kib: u64 = total.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(Node { number, processors, memory_bytes: kib.checked_mul(1024)? })
}

/// The numbers of a list as `0-3,8`.
fn processors(list: &str) -> Option<Vec<usize>> {
    let mut numbers = Vec::new();
    for part in list.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= MAX_NUMBER {
            return None;
        }
        numbers.extend(first..=last);
    }
    Some(numbers)
}

/// The nodes over which memory is worth spreading: those that have some, and processors that this
/// process may use. None if there is one alone.
pub fn to_spread_over(root: &Path) -> Vec<Node> {
    let mut nodes = nodes(root);
    for node in &mut nodes {
        node.processors.retain(|number| system::may_use(*number));
    }
    nodes.retain(|node| node.memory_bytes > 0 && !node.processors.is_empty());
    if nodes.len() > 1 { nodes } else { Vec::new() }
}

impl Node {
    /// Asks for the region's pages to be of this node, as long as it has free ones.
    pub fn hold(&self, region: &Region) {
        if let Err(e) = system::bind(region, self.number) {
            log::debug!("{} bytes of expert memory are of any node: {e}", region.len());
        }
    }

    /// Moves the calling thread to the node's processors, unless it is there.
    pub fn enter(&self) {
        if let Err(e) = system::enter(self) {
            log::debug!("a thread runs on any node: {e}");
        }
    }
}

#[cfg(target_os = "linux")]
mod system {
    use super::{MAX_NUMBER, Node, Region};
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    use std::cell::Cell;
    use std::io;

    pub fn may_use(processor: usize) -> bool {
        let is_known = processor < CpuSet::MAX_CPU;
        is_known && sched_getaffinity(None).is_ok_and(|allowed| allowed.is_set(processor))
    }

    /// `MPOL_PREFERRED` of the system's mempolicy.h.
    const PREFERRED: libc::c_int = 1;

    const WORD_BITS: usize = libc::c_ulong::BITS as usize;

    pub fn bind(region: &Region, node: usize) -> io::Result<()> {
        let mut mask: [libc::c_ulong; MAX_NUMBER / WORD_BITS] = [0; _];
        mask[node / WORD_BITS] |= 1 << (node % WORD_BITS);
        // SAFETY: the call changes where the pages of this region will be, not what they hold; the
        // mask has the bits that are announced, of which the system drops the last.
        let result = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                region.ptr(),
                region.len(),
                PREFERRED,
                mask.as_ptr(),
                MAX_NUMBER + 1,
                0,
            )
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    thread_local! {
        /// The node that the thread has been moved to.
        static ENTERED: Cell<Option<usize>> = const { Cell::new(None) };
    }

    pub fn enter(node: &Node) -> io::Result<()> {
        if ENTERED.get() == Some(node.number) {
            return Ok(());
        }
        let mut set = CpuSet::new();
        node.processors.iter().for_each(|number| set.set(*number));
        sched_setaffinity(None, &set)?;
        ENTERED.set(Some(node.number));
        Ok(())
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use super::{Node, Region};
    use std::io;

    pub fn may_use(_processor: usize) -> bool {
        false
    }

    pub fn bind(_region: &Region, _node: usize) -> io::Result<()> {
        Ok(())
    }

    pub fn enter(_node: &Node) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(root: &Path, node: &str, cpulist: &str, meminfo: &str) {
        let folder = root.join(node);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("cpulist"), cpulist).unwrap();
        fs::write(folder.join("meminfo"), meminfo).unwrap();
    }

    fn meminfo(kib: u64) -> String {
        format!("Node 0 MemTotal:       {kib} kB\nNode 0 MemFree:        1 kB\n")
    }

    #[test]
    fn nodes_are_read_by_number() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "node10", "4-5,9\n", &meminfo(8));
        write(root.path(), "node2", "0-3\n", &meminfo(4));
        // Memory without processors.
        write(root.path(), "node11", "\n", &meminfo(1));
        fs::write(root.path().join("online"), "2,10-11\n").unwrap();
        fs::create_dir(root.path().join("power")).unwrap();
        let node = |number, processors: &[usize], kib: u64| Node {
            number,
            processors: processors.to_vec(),
            memory_bytes: kib << 10,
        };
        let expected = [node(2, &[0, 1, 2, 3], 4), node(10, &[4, 5, 9], 8), node(11, &[], 1)];
        assert_eq!(nodes(root.path()), expected);
    }

    #[test]
    fn what_makes_no_sense_is_left_out() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(nodes(&root.path().join("missing")), []);
        write(root.path(), "node0", "0", &meminfo(1));
        for list in ["x", "1-", "-1", "3-1", "0-99999999999999999999", "0-1000000", "1,,x"] {
            write(root.path(), "node1", list, &meminfo(1));
            assert_eq!(nodes(root.path()).len(), 1, "{list}");
        }
        for text in ["", "Node 1 MemTotal: many kB", "Node 1 MemTotal: 99999999999999999999 kB"] {
            write(root.path(), "node1", "1", text);
            assert_eq!(nodes(root.path()).len(), 1, "{text}");
        }
        write(root.path(), "node99999999", "1", &meminfo(1));
        write(root.path(), "nodes", "1", &meminfo(1));
        fs::create_dir(root.path().join("node3")).unwrap();
        fs::write(root.path().join("node4"), "a file").unwrap();
        assert_eq!(nodes(root.path()).len(), 1);
    }

    #[test]
    fn memory_is_spread_over_several_nodes_that_can_be_used() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "node0", "0", &meminfo(1));
        assert_eq!(to_spread_over(root.path()), []);
        write(root.path(), "node1", "1022-1023", &meminfo(1));
        write(root.path(), "node2", "", &meminfo(1));
        write(root.path(), "node3", "0", &meminfo(0));
        assert_eq!(to_spread_over(root.path()), []);
        write(root.path(), "node4", "0,1023", &meminfo(1));
        let spread = to_spread_over(root.path());
        // A process may be kept off processor 0.
        assert!(spread.is_empty() || spread.iter().map(|node| node.number).eq([0, 4]));
        assert!(spread.iter().all(|node| node.processors == [0]));
    }
}
