//! Tells whether an open file is still what it was when it was opened.

use std::fs::File;
use std::io;

/// Size, number, and time of the last change of an open file's contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    n_bytes: u64,
    inode: u64,
    modified: (i64, i64),
}

impl Stamp {
    /// Costs about a microsecond: the kernel says what it knows, and asks no server and no FUSE
    /// program, which could hang.
    #[cfg(target_os = "linux")]
    pub fn of(file: &File) -> io::Result<Stamp> {
        use rustix::fs::{AtFlags, StatxFlags, statx};
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let wanted = StatxFlags::SIZE | StatxFlags::INO | StatxFlags::MTIME;
        let found = statx(file, "", flags, wanted)?;
        let modified = (found.stx_mtime.tv_sec, i64::from(found.stx_mtime.tv_nsec));
        Ok(Stamp { n_bytes: found.stx_size, inode: found.stx_ino, modified })
    }

    #[cfg(not(target_os = "linux"))]
    pub fn of(file: &File) -> io::Result<Stamp> {
        use std::os::unix::fs::MetadataExt;
        let found = file.metadata()?;
        let modified = (found.mtime(), found.mtime_nsec());
        Ok(Stamp { n_bytes: found.len(), inode: found.ino(), modified })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, PermissionsExt};
    use std::time::Duration;

    #[test]
    fn other_bytes_and_another_length_are_seen_and_other_names_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, [7; 5000]).unwrap();
        let file = File::open(&path).unwrap();
        let first = Stamp::of(&file).unwrap();
        let other = folder.path().join("b");
        std::fs::rename(&path, &other).unwrap();
        std::fs::set_permissions(&other, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(Stamp::of(&file).unwrap(), first);
        // The clock of a file system has ticks.
        std::thread::sleep(Duration::from_millis(20));
        let writer = File::options().write(true).open(&other).unwrap();
        writer.write_at(&[8], 100).unwrap();
        let second = Stamp::of(&file).unwrap();
        assert_ne!(second, first);
        writer.set_len(4999).unwrap();
        assert_ne!(Stamp::of(&file).unwrap(), second);
        std::fs::remove_file(&other).unwrap();
        assert!(Stamp::of(&file).is_ok());
    }
}
