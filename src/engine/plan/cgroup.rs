//! Memory limits of control groups, versions 1 and 2. A process is in one group of each hierarchy,
//! and the limit of every group above it holds as well.

use std::path::{Component, Path, PathBuf};

/// Reads a file of /proc or /sys; a table of texts in tests.
pub type Read<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// Bytes that the tightest of this process's groups has left, page cache that it can drop
/// included. `None` where no group has a limit.
pub fn room(read: Read<'_>) -> Option<u64> {
    least(read, Version::room)
}

/// The least limit of this process's groups. `None` where no group has one.
pub fn limit(read: Read<'_>) -> Option<u64> {
    // One of version 1 that is not set is near 2⁶³.
    least(read, Version::limit).filter(|limit| *limit < 1 << 62)
}

/// The least that `of_group` says of this process's groups.
fn least(read: Read<'_>, of_group: fn(Version, &Path, Read<'_>) -> Option<u64>) -> Option<u64> {
    let groups = read(Path::new("/proc/self/cgroup"))?;
    let mounts = read(Path::new("/proc/self/mountinfo"))?;
    let mounts = mounts.lines().filter_map(Mount::parse);
    let of_mounts = mounts.filter_map(|mount| {
        let group = mount.version.group(&groups)?;
        let levels = mount.levels(group);
        levels.iter().filter_map(|level| of_group(mount.version, level, read)).min()
    });
    of_mounts.min()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// A mount point of a hierarchy that can limit memory.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// The group that is seen at the mount point: not the topmost one, in some containers.
    root: PathBuf,
    point: PathBuf,
}

impl Mount {
    /// A line of /proc/self/mountinfo: `ID PARENT DEV ROOT POINT OPTIONS [TAG…] - TYPE SOURCE
    /// SUPER_OPTIONS`.
    fn parse(line: &str) -> Option<Mount> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(3);
        let (root, point) = (mount.next()?, mount.next()?);
        let mut file_system = file_system.split(' ');
        let version = match file_system.next()? {
            "cgroup2" => Version::V2,
            "cgroup" if file_system.nth(1)?.split(',').any(|o| o == "memory") => Version::V1,
            _ => return None,
        };
        Some(Mount { version, root: unescaped(root).into(), point: unescaped(point).into() })
    }

    /// Folders of the group and of all groups above it, as far as they are seen here. A group that
    /// lies outside of what is mounted is the mount's root as far as a container can tell; one
    /// whose folder is missing has nothing to say, and its parents are asked.
    fn levels(&self, group: &str) -> Vec<PathBuf> {
        let inner = Path::new(group).strip_prefix(&self.root).unwrap_or(Path::new(""));
        let climbs = inner.components().any(|part| part == Component::ParentDir);
        let inner = if climbs { Path::new("") } else { inner };
        inner.ancestors().map(|level| self.point.join(level)).collect()
    }
}

/// mountinfo writes space, tab, newline and backslash as `\040` and so on.
fn unescaped(text: &str) -> String {
    let plain = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    plain.iter().fold(text.to_owned(), |text, (code, c)| text.replace(code, c))
}

impl Version {
    /// The process's group, in /proc/self/cgroup: lines `ID:CONTROLLERS:PATH`, with ID 0 and no
    /// controllers for version 2.
    fn group(self, groups: &str) -> Option<&str> {
        groups.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let found = match self {
                Version::V1 => controllers.split(',').any(|c| c == "memory"),
                Version::V2 => id == "0" && controllers.is_empty(),
            };
            found.then_some(path)
        })
    }

    /// One group's limit, if it has one.
    fn limit(self, group: &Path, read: Read<'_>) -> Option<u64> {
        // One of version 2 that is not set says "max", which is no number; one of version 1 is
        // near 2⁶³, which never is the least. Above `high` nothing is killed, but everything is
        // slowed down.
        let limits: &[&str] = match self {
            Version::V1 => &["memory.limit_in_bytes"],
            Version::V2 => &["memory.max", "memory.high"],
        };
        limits.iter().filter_map(|name| number(group, name, read)).min()
    }

    /// The memory that a group's limit leaves; `None` if it has no limit.
    fn room(self, group: &Path, read: Read<'_>) -> Option<u64> {
        let (usage, cache) = match self {
            Version::V1 => ("memory.usage_in_bytes", ["total_inactive_file", "total_active_file"]),
            Version::V2 => ("memory.current", ["inactive_file", "active_file"]),
        };
        let limit = self.limit(group, read)?;
        let stat = read(&group.join("memory.stat")).unwrap_or_default();
        let reclaimable: u64 = cache.iter().filter_map(|key| field(&stat, key)).sum();
        let used = number(group, usage, read)?.saturating_sub(reclaimable);
        Some(limit.saturating_sub(used))
    }
}

/// The content of one of a group's files, if it is a number.
fn number(group: &Path, name: &str, read: Read<'_>) -> Option<u64> {
    read(&group.join(name))?.trim().parse().ok()
}

/// The value of a line `KEY VALUE`.
fn field(text: &str, key: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A system of these files and no others.
    fn room_of(files: &[(&str, &str)]) -> Option<u64> {
        room(&|path| find(files, path))
    }

    fn limit_of(files: &[(&str, &str)]) -> Option<u64> {
        limit(&|path| find(files, path))
    }

    fn find(files: &[(&str, &str)], path: &Path) -> Option<String> {
        let file = files.iter().find(|(name, _)| Path::new(name) == path);
        file.map(|(_, text)| (*text).to_owned())
    }

    const V1_MOUNTS: &str = "\
23 22 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
24 23 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
25 23 0:32 / /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory
26 23 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";
    const V1_GROUPS: &str = "9:name=systemd:/\n4:memory:/jobs/7\n1:cpu:/elsewhere\n0::/\n";
    const UNLIMITED: &str = "9223372036854771712\n";

    #[test]
    fn version_1_counts_every_level() {
        let job = "/sys/fs/cgroup/memory/jobs/7";
        let (limit, usage, stat) = (
            format!("{job}/memory.limit_in_bytes"),
            format!("{job}/memory.usage_in_bytes"),
            format!("{job}/memory.stat"),
        );
        let mut files = vec![
            ("/proc/self/cgroup", V1_GROUPS),
            ("/proc/self/mountinfo", V1_MOUNTS),
            (&limit, "1000\n"),
            (&usage, "800\n"),
            (&stat, "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 50\n"),
        ];
        assert_eq!(room_of(&files), Some(350));
        files.push(("/sys/fs/cgroup/memory/jobs/memory.limit_in_bytes", "2000\n"));
        files.push(("/sys/fs/cgroup/memory/jobs/memory.usage_in_bytes", "1900\n"));
        assert_eq!(room_of(&files), Some(100));
        assert_eq!(limit_of(&files), Some(1000));
        // A group may be above its limit for a moment.
        files[3].1 = "1200\n";
        assert_eq!(room_of(&files), Some(0));
    }

    #[test]
    fn version_1_without_a_limit_has_room_for_anything() {
        let files = [
            ("/proc/self/cgroup", V1_GROUPS),
            ("/proc/self/mountinfo", V1_MOUNTS),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", UNLIMITED),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n"),
        ];
        assert!(room_of(&files).unwrap() > 1 << 62);
        assert_eq!(limit_of(&files), None);
        assert_eq!(room_of(&files[..2]), None);
        assert_eq!(room_of(&files[..1]), None);
        assert_eq!(room_of(&[]), None);
    }

    const V2_MOUNTS: &str = "31 30 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";

    #[test]
    fn version_2_takes_the_lower_of_max_and_high() {
        let mut files = vec![
            ("/proc/self/cgroup", "0::/user.slice/a b.scope\n"),
            ("/proc/self/mountinfo", V2_MOUNTS),
            ("/sys/fs/cgroup/user.slice/a b.scope/memory.max", "max\n"),
            ("/sys/fs/cgroup/user.slice/a b.scope/memory.high", "max\n"),
            ("/sys/fs/cgroup/user.slice/a b.scope/memory.current", "300\n"),
            (
                "/sys/fs/cgroup/user.slice/a b.scope/memory.stat",
                "anon 100\nfile 200\ninactive_file 120\nactive_file 60\n",
            ),
        ];
        assert_eq!((room_of(&files), limit_of(&files)), (None, None));
        files[2].1 = "1000\n";
        assert_eq!(room_of(&files), Some(880));
        files[3].1 = "500\n";
        assert_eq!(room_of(&files), Some(380));
        files.push(("/sys/fs/cgroup/user.slice/memory.max", "400\n"));
        files.push(("/sys/fs/cgroup/user.slice/memory.current", "350\n"));
        assert_eq!(room_of(&files), Some(50));
        assert_eq!(limit_of(&files), Some(400));
    }

    /// Without a namespace of its own a container sees the host's path, mounted at its root.
    #[test]
    fn a_container_is_the_root_of_its_mount() {
        let mount = |root: &str| format!("31 30 0:26 {root} /cg ro - cgroup2 cgroup2 rw\n");
        let cases = [
            ("0::/docker/abc\n", "/docker/abc"),
            ("0::/docker/abc/missing\n", "/docker/abc"),
            ("0::/docker/abcdef\n", "/docker/abc"),
            ("0::/not/there\n", "/"),
            ("0::/../../host.slice\n", "/"),
        ];
        for (groups, root) in cases {
            let mounts = mount(root);
            let files = [
                ("/proc/self/cgroup", groups),
                ("/proc/self/mountinfo", &mounts),
                ("/cg/memory.max", "1000\n"),
                ("/cg/memory.current", "10\n"),
            ];
            assert_eq!(room_of(&files), Some(990), "{groups} {root}");
        }
    }

    #[test]
    fn mount_points_may_hold_blanks() {
        let mount = Mount::parse("1 2 0:3 /x /a\\040b rw master:1 - cgroup2 none rw").unwrap();
        assert_eq!((mount.root, mount.point), ("/x".into(), "/a b".into()));
        assert_eq!(Mount::parse("1 2 0:3 / /p rw - ext4 /dev/a rw,memory"), None);
        assert_eq!(Mount::parse("1 2 0:3 / /p rw - cgroup cgroup rw,cpu"), None);
        assert_eq!(Mount::parse(""), None);
    }
}
