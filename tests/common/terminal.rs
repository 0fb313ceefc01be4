//! A pseudo-terminal with a program on it: what is typed and what is seen.

use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A program whose terminal is ours.
pub struct Terminal {
    pub child: Child,
    pub keys: File,
    pub seen: Arc<Mutex<String>>,
}

impl Terminal {
    /// `setsid` takes the test's own terminal away from the program.
    pub fn open(program: Command) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let slave = OpenOptions::new().read(true).write(true).open(name).unwrap();
        let mut command = Command::new("setsid");
        command.arg(program.get_program()).args(program.get_args());
        if let Some(folder) = program.get_current_dir() {
            command.current_dir(folder);
        }
        for (name, value) in program.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("TERM", "xterm").env_remove("NO_COLOR");
        let clone = || slave.try_clone().unwrap();
        command.stdin(clone()).stdout(clone()).stderr(clone());
        let child = command.spawn().unwrap();
        let (keys, mut screen) = (File::from(master.try_clone().unwrap()), File::from(master));
        let seen = Arc::new(Mutex::new(String::new()));
        let shared = seen.clone();
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n @ 1..) = screen.read(&mut bytes) {
                shared.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..n]));
            }
        });
        Self { child, keys, seen }
    }

    /// Types, then waits until the screen shows `answer` after what it showed before.
    pub fn type_and_see(&mut self, keys: &str, answer: &str) -> String {
        let before = self.seen.lock().unwrap().len();
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.see(before, answer)
    }

    /// Waits until the screen shows `answer` behind its first `from` bytes.
    pub fn see(&self, from: usize, answer: &str) -> String {
        let start = Instant::now();
        loop {
            let seen = self.seen.lock().unwrap()[from..].to_owned();
            if seen.contains(answer) {
                return seen;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "no {answer:?} in {seen:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The exit code, once the program has ended.
    pub fn code(mut self) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(start.elapsed() < Duration::from_secs(60), "the program goes on");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A test that fails leaves no program behind.
impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
