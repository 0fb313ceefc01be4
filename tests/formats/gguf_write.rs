//! The writer: what it writes the reader reads back, and whatever goes wrong leaves nothing under
//! the final name and no temporary file.

use moeba::gguf::{Gguf, OwnedArray, OwnedValue, TensorType, Writer};
use moeba::{Error, interrupt};
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn any_value() -> impl Strategy<Value = OwnedValue> {
    let text = || vec(any::<u8>(), 0..20);
    let scalar = prop_oneof![
        any::<u8>().prop_map(OwnedValue::from),
        any::<i8>().prop_map(OwnedValue::from),
        any::<u16>().prop_map(OwnedValue::from),
        any::<i16>().prop_map(OwnedValue::from),
        any::<u32>().prop_map(OwnedValue::from),
        any::<i32>().prop_map(OwnedValue::from),
        any::<f32>().prop_map(OwnedValue::from),
        any::<bool>().prop_map(OwnedValue::from),
        text().prop_map(OwnedValue::String),
        any::<String>().prop_map(OwnedValue::from),
    ];
    let array = prop_oneof![
        vec(any::<u8>(), 0..9).prop_map(OwnedArray::U8),
        vec(any::<i8>(), 0..9).prop_map(OwnedArray::I8),
        vec(any::<u16>(), 0..9).prop_map(OwnedArray::U16),
        vec(any::<i16>(), 0..9).prop_map(OwnedArray::I16),
        vec(any::<u32>(), 0..9).prop_map(OwnedArray::U32),
        vec(any::<i32>(), 0..9).prop_map(OwnedArray::I32),
        vec(any::<f32>(), 0..9).prop_map(OwnedArray::F32),
        vec(any::<bool>(), 0..9).prop_map(OwnedArray::Bool),
        vec(text(), 0..9).prop_map(OwnedArray::String),
    ];
    let wide = prop_oneof![
        any::<u64>().prop_map(OwnedValue::from),
        any::<i64>().prop_map(OwnedValue::from),
        any::<f64>().prop_map(OwnedValue::from),
        vec(any::<u64>(), 0..9).prop_map(|v| OwnedValue::Array(OwnedArray::U64(v))),
        vec(any::<i64>(), 0..9).prop_map(|v| OwnedValue::Array(OwnedArray::I64(v))),
        vec(any::<f64>(), 0..9).prop_map(|v| OwnedValue::Array(OwnedArray::F64(v))),
    ];
    prop_oneof![scalar, wide, array.prop_map(OwnedValue::Array)]
}

/// Type and dimensions.
fn any_tensor() -> impl Strategy<Value = (TensorType, Vec<u64>)> {
    let ty = proptest::sample::select(TensorType::all().collect::<Vec<_>>());
    (ty, 1..4u64, vec(1..4u64, 0..4)).prop_map(|(ty, blocks, rest)| {
        let mut dims = vec![blocks * ty.block_len() as u64];
        dims.extend(rest);
        (ty, dims)
    })
}

/// So many bytes, different for each `seed`.
fn pattern(seed: usize, n: u64) -> Vec<u8> {
    (0..n).map(|i| (i as usize * 7 + seed * 13) as u8).collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn a_file_comes_back_as_written(
        metadata in btree_map("[a-z.]{1,30}", any_value(), 0..12),
        tensors in btree_map("[a-z0-9_.é]{1,30}", any_tensor(), 0..8),
        alignment in proptest::sample::select(vec![None, Some(8), Some(32), Some(256), Some(4096)]),
        piece in 1..5000usize,
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.gguf");
        let mut writer = Writer::create(&path, alignment).unwrap();
        for (key, value) in &metadata {
            writer.set(key, value.clone()).unwrap();
        }
        let mut sizes = Vec::new();
        for (name, (ty, dims)) in &tensors {
            sizes.push(writer.declare(name, dims, *ty).unwrap());
        }
        for (i, name) in tensors.keys().enumerate() {
            writer.begin_tensor(name).unwrap();
            for bytes in pattern(i, sizes[i]).chunks(piece) {
                writer.write(bytes).unwrap();
            }
            writer.end_tensor().unwrap();
        }
        prop_assert!(!path.exists());
        writer.finish().unwrap();
        prop_assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

        let gguf = Gguf::open(&path).unwrap();
        prop_assert_eq!(gguf.alignment(), u64::from(alignment.unwrap_or(32)));
        let found = gguf.keys().filter(|(key, _)| *key != "general.alignment");
        let found: Vec<_> = found.map(|(k, v)| (k.to_owned(), OwnedValue::from(v))).collect();
        // By text, as NaN is not equal to itself.
        prop_assert_eq!(format!("{found:?}"), format!("{:?}", Vec::from_iter(metadata)));
        prop_assert_eq!(gguf.tensors().len(), tensors.len());
        for (i, (t, (name, (ty, dims)))) in gguf.tensors().iter().zip(&tensors).enumerate() {
            prop_assert_eq!((&t.name, t.ty, &t.dims), (name, *ty, dims));
            prop_assert_eq!(gguf.bytes(t), pattern(i, sizes[i]));
        }
    }
}

/// The sentence of a refusal.
fn refused<X: std::fmt::Debug>(result: moeba::Result<X>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Format { .. }), "{error}");
    error.to_string()
}

#[test]
fn what_no_reader_would_accept_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.gguf");
    for alignment in [0, 1, 12, 1 << 21] {
        assert!(refused(Writer::create(&path, Some(alignment))).contains("a power of two"));
    }
    assert!(refused(Writer::create(dir.path(), None)).contains("got a directory"));
    let mut w = Writer::create(&path, None).unwrap();
    w.set("k", 1u32).unwrap();
    assert!(refused(w.set("k", 2u32)).contains("k: expected a new key"));
    assert!(refused(w.set("", 2u32)).contains("a key of 1 to 65535 bytes, got 0 bytes"));
    assert!(refused(w.set(&"k".repeat(65_536), 2u32)).contains("got 65536 bytes"));
    assert!(refused(w.set("general.alignment", 8u32)).contains("the alignment given on creation"));
    let f32 = TensorType::F32;
    assert_eq!(w.declare("a", &[8], f32).unwrap(), 32);
    assert!(refused(w.declare("a", &[8], f32)).contains("a: expected a new tensor name"));
    assert!(refused(w.declare("", &[8], f32)).contains("got 0 bytes"));
    assert!(refused(w.declare(&"n".repeat(64), &[8], f32)).contains("got 64 bytes"));
    assert!(refused(w.declare("b", &[], f32)).contains("number of dimensions: expected 1 to 4"));
    assert!(refused(w.declare("b", &[1; 5], f32)).contains("expected 1 to 4, got 5"));
    assert!(refused(w.declare("b", &[0], f32)).contains("at least 1 each"));
    assert!(refused(w.declare("b", &[33], TensorType::Q8_0)).contains("a multiple of 32"));
    assert!(refused(w.declare("b", &[1 << 62, 4], f32)).contains("fewer than 2^63 bytes"));
    drop(w);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn data_comes_in_order_and_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.gguf");
    let start = || {
        let mut w = Writer::create(&path, None).unwrap();
        w.declare("a", &[2], TensorType::F32).unwrap();
        w.declare("b", &[2], TensorType::F32).unwrap();
        w
    };
    let mut w = start();
    assert!(refused(w.write(&[0])).contains("expected the start of a tensor"));
    assert!(refused(w.begin_tensor("b")).contains("expected the data of a next"));
    w.begin_tensor("a").unwrap();
    assert!(refused(w.set("late", 1u32)).contains("late: expected all metadata and tensors"));
    assert!(refused(w.declare("late", &[1], TensorType::F32)).contains("late: expected all"));
    assert!(refused(w.begin_tensor("b")).contains("expected the end of the previous tensor"));
    w.write(&[0; 3]).unwrap();
    assert!(refused(w.end_tensor()).contains("a: expected 8 bytes, got 3"));
    assert!(refused(w.write(&[0; 6])).contains("a: expected 8 bytes, got at least 1 more"));
    w.write(&[0; 5]).unwrap();
    w.end_tensor().unwrap();
    assert!(refused(w.end_tensor()).contains("expected the start of a tensor, got an end"));
    assert!(refused(w.finish()).contains("b: expected all of its data"));
    assert!(refused(start().finish()).contains("a: expected all of its data"));
    let mut w = start();
    w.write_tensor("a", &[0; 8]).unwrap();
    w.write_tensor("b", &[0; 8]).unwrap();
    assert!(refused(w.begin_tensor("a")).contains("expected no more tensors"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "the temporary file alone");
    drop(w);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn an_older_file_stays_until_the_new_one_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out.gguf");
    fs::write(&path, "older").unwrap();
    let mut writer = Writer::create(&path, None).unwrap();
    writer.declare("a", &[1 << 20], TensorType::F32).unwrap();
    writer.begin_tensor("a").unwrap();
    writer.write(&vec![0; 3 << 20]).unwrap();
    drop(writer);
    assert_eq!(fs::read(&path).unwrap(), b"older");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    Writer::create(&path, None).unwrap().finish().unwrap();
    assert!(Gguf::open(&path).unwrap().tensors().is_empty());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[cfg(unix)]
#[test]
fn others_may_read_the_file() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let (path, plain) = (dir.path().join("out.gguf"), dir.path().join("plain"));
    fs::write(&plain, "").unwrap();
    Writer::create(&path, None).unwrap().finish().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&path), mode(&plain));
}

#[test]
fn no_folder_to_write_into() {
    let error = Writer::create("/nonexistent-folder/out.gguf", None).unwrap_err();
    assert!(matches!(error, Error::Io { .. }));
    assert!(error.to_string().starts_with("/nonexistent-folder/out.gguf: "), "{error}");
}

/// Names the folder that a child process writes into, and what it is to do there.
const CHILD_FOLDER: &str = "MOEBA_TEST_WRITE_INTO";
const CHILD_MODE: &str = "MOEBA_TEST_MODE";

/// Not a test of its own: what the tests below start this program again for.
#[test]
fn child() {
    let Ok(folder) = std::env::var(CHILD_FOLDER) else { return };
    let folder = Path::new(&folder);
    match std::env::var(CHILD_MODE).as_deref() {
        Ok("big") => write_a_big_file(folder),
        Ok(mode) => write_until_interrupted(folder, mode == "patient"),
        Err(_) => panic!("no mode given"),
    }
}

/// Writes 8 MiB and reports how that ended and what is left in the folder.
fn write_a_big_file(folder: &Path) {
    let write = || {
        let mut writer = Writer::create(folder.join("out.gguf"), None)?;
        writer.declare("a", &[1 << 21], TensorType::F32)?;
        writer.begin_tensor("a")?;
        for _ in 0..8 {
            writer.write(&vec![1; 1 << 20])?;
        }
        writer.end_tensor()?;
        writer.finish()
    };
    let end = write().map_or_else(|e| e.to_string(), |()| "written".into());
    let n_left = fs::read_dir(folder).unwrap().count();
    println!("\nEND {end}, {n_left} files left");
}

/// Like a conversion: asks for Ctrl-C between pieces, or (not `patient`) is stuck and does not.
fn write_until_interrupted(folder: &Path, patient: bool) {
    interrupt::install().unwrap();
    let mut writer = Writer::create(folder.join("out.gguf"), None).unwrap();
    writer.declare("a", &[1 << 40], TensorType::Q8_0).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
        if patient && interrupt::check().is_err() {
            drop(writer);
            std::process::exit(interrupt::exit_code());
        }
    }
    panic!("nobody interrupted");
}

/// This program again, to run `child` only, by way of a shell that first does `prepare`.
fn shell(prepare: &str, folder: &Path, mode: &str) -> Command {
    let mut command = Command::new("sh");
    let program = std::env::current_exe().unwrap();
    command.arg("-c").arg(format!("{prepare} && exec \"$0\" \"$@\"")).arg(program);
    command.args(["--exact", "gguf_write::child", "--nocapture", "--test-threads=1"]);
    command.env(CHILD_FOLDER, folder).env(CHILD_MODE, mode).stdin(Stdio::null());
    command
}

fn end_line(output: &Output) -> Option<String> {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().find_map(|line| line.strip_prefix("END ")).map(str::to_owned)
}

#[cfg(unix)]
#[test]
fn a_limit_on_the_size_of_files() {
    let dir = tempfile::tempdir().unwrap();
    // With the signal ignored the write fails with EFBIG; ulimit counts blocks of 512 or 1024.
    let output = shell("trap '' XFSZ && ulimit -f 2048", dir.path(), "big").output().unwrap();
    let end = end_line(&output).unwrap_or_else(|| panic!("{output:?}"));
    assert!(end.contains("out.gguf: File too large") && end.ends_with("0 files left"), "{end}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk() {
    let dir = tempfile::tempdir().unwrap();
    // In a mount namespace of its own, which needs root or user namespaces.
    let mount = format!("mount -t tmpfs -o size=1m tmpfs '{}'", dir.path().display());
    let inner = format!("{mount} && exec \"$0\" \"$@\"");
    let mut command = Command::new("unshare");
    command.args(["-r", "-m", "sh", "-c", &inner]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", "gguf_write::child", "--nocapture", "--test-threads=1"]);
    command.env(CHILD_FOLDER, dir.path()).env(CHILD_MODE, "big");
    let output = command.output();
    let Some(end) = output.as_ref().ok().and_then(end_line) else {
        eprintln!("skipped: no small file system can be mounted here ({output:?})");
        return;
    };
    let expected = "out.gguf: No space left on device";
    assert!(end.contains(expected) && end.ends_with("0 files left"), "{end}");
}

#[cfg(unix)]
mod signals {
    use super::*;
    use rustix::process::{Pid, Signal, kill_process};
    use std::process::ExitStatus;

    /// A child that has its temporary file open and its handler installed.
    fn started(folder: &Path, mode: &str) -> Child {
        let mut command = shell("true", folder, mode);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_for(|| fs::read_dir(folder).unwrap().count() == 1);
        child
    }

    fn wait_for(mut done: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !done() {
            assert!(Instant::now() < deadline, "waited too long");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn send(child: &Child, signal: Signal) {
        kill_process(Pid::from_child(child), signal).unwrap();
    }

    fn end(mut child: Child) -> ExitStatus {
        wait_for(|| child.try_wait().unwrap().is_some());
        child.wait().unwrap()
    }

    #[test]
    fn one_ctrl_c_ends_the_work() {
        let dir = tempfile::tempdir().unwrap();
        let child = started(dir.path(), "patient");
        send(&child, Signal::INT);
        assert_eq!(end(child).code(), Some(130));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_second_ctrl_c_ends_the_program() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = started(dir.path(), "stuck");
        send(&child, Signal::INT);
        std::thread::sleep(Duration::from_millis(300));
        assert!(child.try_wait().unwrap().is_none(), "the first only asks");
        send(&child, Signal::INT);
        assert_eq!(end(child).code(), Some(130));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    /// Nothing can tidy up after SIGKILL, but the final name stays free.
    #[test]
    fn kill_leaves_no_file_under_the_final_name() {
        let dir = tempfile::tempdir().unwrap();
        let child = started(dir.path(), "patient");
        send(&child, Signal::KILL);
        assert_eq!(end(child).code(), None);
        assert!(!dir.path().join("out.gguf").exists());
    }
}
