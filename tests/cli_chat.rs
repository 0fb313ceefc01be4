//! The interactive chat on a pseudo-terminal: history, commands, Ctrl-C.
#![cfg(target_os = "linux")]

mod cli_support;

use cli_support::{Model, Tiny, moeba, tiny};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A chat whose terminal is ours.
struct Terminal {
    child: Child,
    keys: File,
    seen: Arc<Mutex<String>>,
}

impl Terminal {
    /// `setsid` takes the test's own terminal away from the program.
    fn open(model: &Model, args: &[&str]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let slave = OpenOptions::new().read(true).write(true).open(name).unwrap();
        let program = moeba();
        let mut command = Command::new("setsid");
        command.arg(program.get_program()).args(["run", "--temp", "0", "--ignore-eos"]);
        command.arg(&model.path).args(args).env("MOEBA_HISTORY", "").env("TERM", "xterm");
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
    fn type_and_see(&mut self, keys: &str, answer: &str) -> String {
        let before = self.seen.lock().unwrap().len();
        self.keys.write_all(keys.as_bytes()).unwrap();
        self.see(before, answer)
    }

    fn see(&self, from: usize, answer: &str) -> String {
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

    fn code(mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

fn model() -> Model {
    tiny(Tiny { chat: true, ..Tiny::default() })
}

#[test]
fn a_chat_keeps_its_history_in_the_cache() {
    let model = model();
    let mut terminal = Terminal::open(&model, &["-n", "5"]);
    terminal.see(0, "> ");
    terminal.type_and_see("hello\r", "> ");
    terminal.type_and_see("again\r", "> ");
    let stats = terminal.type_and_see("/stats\r", "peak memory");
    assert!(stats.contains("more were in the cache"), "{stats}");
    terminal.type_and_see("/regen\r", "> ");
    terminal.type_and_see("/set temp nan\r", "expected a number");
    terminal.type_and_see("/set n 3\r", "> ");
    terminal.type_and_see("/nonsense\r", "no command /nonsense");
    terminal.type_and_see("/read /nonexistent\r", "/nonexistent: ");
    terminal.type_and_see("\"\"\"two\r", ". ");
    terminal.type_and_see("lines\"\"\"\r", "> ");
    terminal.type_and_see("/clear\r", "> ");
    let long = "x".repeat(300);
    terminal.type_and_see(&format!("{long}\r"), "shorten it or raise -c");
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
}

#[test]
fn ctrl_c_ends_an_answer_and_twice_the_program() {
    let model = model();
    let mut terminal = Terminal::open(&model, &["-c", "1000000"]);
    terminal.see(0, "> ");
    let before = terminal.seen.lock().unwrap().len();
    terminal.keys.write_all(b"hello\r").unwrap();
    // The answer has begun when more is on the screen than what was typed.
    while terminal.seen.lock().unwrap().len() < before + 200 {
        std::thread::sleep(Duration::from_millis(10));
    }
    // `setsid` left no controlling terminal that would turn the key into a signal.
    let pid = terminal.child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let answer = terminal.see(before, "(interrupted)");
    // A key that comes before the next prompt is no key of the line editor's.
    terminal.see(before + answer.find("(interrupted)").unwrap(), "> ");
    terminal.type_and_see("\u{3}", "Ctrl-C again");
    terminal.type_and_see("\u{3}", "interrupted");
    assert_eq!(terminal.code(), Some(130));
}
