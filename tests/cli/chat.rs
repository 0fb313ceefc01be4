//! The interactive chat on a pseudo-terminal: history, commands, Ctrl-C.
#![cfg(target_os = "linux")]

use common::cli::{Model, Tiny, moeba, tiny};
use common::convert_golden;
use common::terminal::Terminal;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A chat on a terminal of ours.
fn open(model: &Model, args: &[&str]) -> Terminal {
    let mut command = moeba();
    command.args(["run", "--temp", "0", "--ignore-eos"]).arg(&model.path).args(args);
    command.env("MOEBA_HISTORY", model.file("history"));
    Terminal::open(command)
}

/// The lines of a chat's history.
fn history(model: &Model) -> Vec<String> {
    let text = std::fs::read_to_string(model.file("history")).unwrap();
    text.lines().skip(1).map(str::to_owned).collect()
}

fn model() -> Model {
    tiny(Tiny { chat: true, ..Tiny::default() })
}

#[test]
fn a_chat_keeps_its_history_in_the_cache() {
    let model = model();
    let mut terminal = open(&model, &["-n", "5"]);
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
    terminal.type_and_see("/stats\r", "0 of 256 tokens of context used");
    let long = "x".repeat(300);
    terminal.type_and_see(&format!("{long}\r"), "shorten it or raise -c");
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
}

/// A chat that has filled its context goes on without its oldest messages, and says so.
#[test]
fn a_full_chat_goes_on() {
    let model = model();
    let mut terminal = open(&model, &["-n", "5", "-c", "200"]);
    terminal.see(0, "> ");
    let message = "y".repeat(40);
    for _ in 0..2 {
        let before = terminal.seen.lock().unwrap().len();
        let seen = terminal.type_and_see(&format!("{message}\r"), "tokens/s");
        assert!(!seen.contains("oldest"), "{seen}");
        terminal.see(before + seen.find("tokens/s").unwrap(), "> ");
    }
    let seen = terminal.type_and_see(&format!("{message}\r"), "tokens/s");
    assert!(seen.contains("(the context of 200 tokens is full: the "), "{seen}");
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
}

/// A conversation that was written to a file goes on in another chat, and a file's text goes with
/// a message.
#[test]
fn conversations_and_texts_are_read_from_files() {
    let model = model();
    let [kept, note, other] = ["kept.json", "note.txt", "other.txt"].map(|name| model.file(name));
    std::fs::write(&note, "a note\n").unwrap();
    std::fs::write(&other, "not a conversation").unwrap();
    let command = |name: &str, path: &Path| format!("/{name} {}\r", path.display());
    let mut terminal = open(&model, &["-n", "5"]);
    terminal.see(0, "> ");
    terminal.type_and_see(&command("read", &note), "goes with the next message: 1 line");
    terminal.type_and_see("and?\r", "tokens/s");
    terminal.type_and_see(&command("save", &kept), "the conversation is in ");
    terminal.type_and_see(&command("save", &other), "expected {\"messages\"");
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
    assert_eq!(std::fs::read_to_string(&other).unwrap(), "not a conversation");
    let json: Value = serde_json::from_slice(&std::fs::read(&kept).unwrap()).unwrap();
    let sent = format!("{}:\n\na note\n\nand?", note.display());
    assert_eq!(json["messages"][0], json!({"role": "user", "content": sent}));
    assert_eq!(json["messages"][1]["role"], "assistant");
    let mut terminal = open(&model, &["-n", "5"]);
    terminal.see(0, "> ");
    terminal.type_and_see(&command("load", &other), "expected {\"messages\"");
    terminal.type_and_see(&command("load", &kept), "goes on: 2 messages");
    terminal.type_and_see("/regen\r", "tokens/s");
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
}

#[test]
fn ctrl_c_ends_an_answer_and_twice_the_program() {
    let model = model();
    let mut terminal = open(&model, &["-c", "1000000"]);
    terminal.see(0, "> ");
    let before = terminal.seen.lock().unwrap().len();
    terminal.keys.write_all(b"hello\r").unwrap();
    // The answer has begun when more is on the screen than what was typed.
    while terminal.seen.lock().unwrap().len() < before + 200 {
        std::thread::sleep(Duration::from_millis(10));
    }
    // Keys that are typed meanwhile are the next message's, and not shown in the answer.
    terminal.keys.write_all(b"QUIET").unwrap();
    std::thread::sleep(Duration::from_millis(100));
    assert!(!terminal.seen.lock().unwrap()[before..].contains("QUIET"));
    // `setsid` left no controlling terminal that would turn the key into a signal.
    let pid = terminal.child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let answer = terminal.see(before, "(interrupted)");
    // A key that comes before the next prompt is no key of the line editor's.
    terminal.see(before + answer.find("(interrupted)").unwrap(), "> ");
    let before = terminal.seen.lock().unwrap().len();
    let hint = terminal.type_and_see("\u{3}", "Ctrl-C again");
    terminal.see(before + hint.find("Ctrl-C again").unwrap(), "> ");
    terminal.type_and_see("\u{3}", "interrupted");
    assert_eq!(terminal.code(), Some(130));
}

/// -q does not silence the reply to a command.
#[test]
fn commands_answer_in_a_quiet_chat() {
    let model = model();
    let mut terminal = open(&model, &["-q", "-n", "3"]);
    terminal.see(0, "> ");
    for (command, answer) in [
        ("/help", "/system TEXT"),
        ("/foo", "no command /foo"),
        ("/set", "repeat-penalty "),
        ("/set temp", "temp is 0\r"),
        ("/set temp 0.5", "temp is 0.5\r"),
        ("/set foo 1", "the options are temp, "),
        ("/set n 2", "n is 2\r"),
        ("/set top-k x", "expected a whole number"),
        ("/system Be brief", "the system prompt is set"),
        ("/system", "there is no system prompt now"),
        ("/read", "/read needs"),
        ("/read /nonexistent", "error:\u{1b}[0m /nonexistent: "),
        ("/regen", "no answer to repeat yet"),
        ("/sta\t", "nothing has been generated yet"),
        ("/clear", "the conversation is forgotten"),
    ] {
        let before = terminal.seen.lock().unwrap().len();
        let seen = terminal.type_and_see(&format!("{command}\r"), answer);
        terminal.see(before + seen.find(answer).unwrap(), "> ");
    }
    // Lines that only look like commands are messages.
    for line in ["/etc/passwd is what?", " /help"] {
        let before = terminal.seen.lock().unwrap().len();
        let seen = terminal.type_and_see(&format!("{line}\r"), "\n");
        terminal.see(before + seen.find('\n').unwrap(), "> ");
    }
    terminal.type_and_see("/stats\r", "generated 2 tokens");
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
}

/// The lines on a screen of unlimited height after what a program wrote to it.
fn screen(written: &str) -> Vec<String> {
    let (mut lines, mut row, mut column) = (vec![Vec::new()], 0usize, 0usize);
    let mut chars = written.chars();
    while let Some(c) = chars.next() {
        match c {
            '\r' => column = 0,
            '\n' => (row, column) = (row + 1, 0),
            '\u{1b}' => {
                let mut code = String::new();
                while !code.ends_with(|c: char| c.is_ascii_alphabetic()) {
                    code.extend(chars.next());
                }
                match code.as_str().trim_start_matches('[') {
                    "2K" => lines[row].clear(),
                    "A" | "1A" => row -= 1,
                    _ => {}
                }
            }
            c => {
                let line: &mut Vec<char> = &mut lines[row];
                line.resize(line.len().max(column + 1), ' ');
                line[column] = c;
                column += 1;
            }
        }
        lines.resize(lines.len().max(row + 1), Vec::new());
    }
    lines.into_iter().map(|line| line.into_iter().collect()).collect()
}

/// A prompt of so many times 14 tokens.
fn long_prompt(model: &Model, n: usize, args: &[&str]) -> Terminal {
    let file = model.file("prompt");
    std::fs::write(&file, "a long prompt ".repeat(n)).unwrap();
    let file = file.to_str().unwrap();
    open(model, &[&["-st", "-c", "100000", "-n", "1", "-f", file], args].concat())
}

#[test]
fn a_bar_goes_when_its_work_is_done() {
    let model = model();
    let terminal = long_prompt(&model, 200, &[]);
    let written = terminal.see(0, "iB\u{1b}[0m");
    assert_eq!(terminal.code(), Some(0));
    // A fast machine needs less time than a bar is worth.
    let was_slow = !written.split("; prompt 2,8").nth(1).unwrap().contains(" ms");
    assert!(written.contains("prompt [") || !was_slow, "{written:?}");
    let lines = screen(&written);
    assert!(!lines.iter().any(|line| line.contains(" [")), "{lines:?}");
    // The figures stand back.
    assert!(written.contains("\u{1b}[2m1 token; "), "{written:?}");
    let quiet = long_prompt(&model, 200, &["-q"]);
    let seen = quiet.seen.clone();
    assert_eq!(quiet.code(), Some(0));
    let seen = seen.lock().unwrap();
    assert!(!seen.contains('[') && seen.lines().count() <= 2, "{seen:?}");
}

#[test]
fn an_interrupted_prompt_leaves_no_bar() {
    let model = model();
    let terminal = long_prompt(&model, 1500, &["-v"]);
    terminal.see(0, "prompt [");
    let pid = terminal.child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let written = terminal.see(0, "interrupted");
    assert_eq!(terminal.code(), Some(130));
    let lines = screen(&written);
    assert!(!lines.iter().any(|line| line.contains(" [")), "{lines:?}");
}

/// How much of the context a chat's `/stats` says is used.
fn used(stats: &str) -> String {
    let end = stats.find(" tokens of context used").expect(stats);
    stats[..end].lines().last().unwrap().to_owned()
}

const QUESTIONS: [&str; 5] = ["one?", "two?", "three?", "four?", "five?"];

#[test]
fn lines_that_are_typed_during_an_answer_are_turns_of_their_own() {
    let model = model();
    let args = ["-n", "40", "-c", "2048"];
    let mut slow = open(&model, &args);
    slow.see(0, "> ");
    for question in ["first", "/set n 3"].iter().chain(&QUESTIONS) {
        slow.type_and_see(&format!("{question}\r"), "> ");
    }
    let expected = used(&slow.type_and_see("/stats\r", "context used"));
    slow.type_and_see("/exit\r", "");
    assert_eq!(slow.code(), Some(0));
    let typed = history(&model);
    assert_eq!(typed.len(), 2 + QUESTIONS.len() + 2, "{typed:?}");

    std::fs::remove_file(model.file("history")).unwrap();
    let mut ahead = open(&model, &args);
    ahead.see(0, "> ");
    let before = ahead.seen.lock().unwrap().len();
    // A key at a time until the first answer begins; the rest meets a program that computes.
    ahead.keys.write_all(b"first\r").unwrap();
    while ahead.seen.lock().unwrap().len() < before + "first".len() + 8 {
        std::thread::sleep(Duration::from_millis(1));
    }
    for line in ["/set n 3"].iter().chain(&QUESTIONS) {
        ahead.keys.write_all(format!("{line}\r").as_bytes()).unwrap();
    }
    let seen = ahead.type_and_see("/stats\r/exit\r", "context used");
    assert_eq!(used(&seen), expected);
    assert_eq!(ahead.code(), Some(0));
    assert_eq!(history(&model), typed);
}

#[test]
fn a_paste_without_brackets_loses_no_line() {
    let model = model();
    let mut terminal = open(&model, &["-n", "1", "-c", "2048"]);
    terminal.see(0, "> ");
    // More than the line editor's buffer and the terminal's hold.
    let pasted: Vec<String> = (0..700).map(|i| format!("/set seed {i}")).collect();
    let block = ["\"\"\"", "a\tb", "  c", "\"\"\"", "end"].map(str::to_owned);
    let all: Vec<String> = pasted.into_iter().chain(block).collect();
    let bytes = all.iter().map(|line| format!("{line}\r")).collect::<String>();
    assert!(bytes.len() > 8192);
    let mut keys = terminal.keys.try_clone().unwrap();
    let typing = std::thread::spawn(move || keys.write_all(bytes.as_bytes()).unwrap());
    typing.join().unwrap();
    // Ctrl-D is the last key. It may come while an answer is computed.
    terminal.keys.write_all(b"\x04").unwrap();
    assert_eq!(terminal.code(), Some(0));
    assert_eq!(history(&model), all);
}

#[test]
fn a_single_turn_takes_a_block_and_its_line() {
    let model = model();
    let mut terminal = open(&model, &["-n", "1", "-st"]);
    terminal.see(0, "> ");
    terminal.keys.write_all(b"\r\"\"\"one\rtwo\rthree\"\"\"\r").unwrap();
    assert_eq!(terminal.code(), Some(0));
    assert_eq!(history(&model), ["\"\"\"one", "two", "three\"\"\""]);
}

#[test]
fn chats_at_the_same_time_keep_the_lines_of_both() {
    let model = model();
    let mut terminals = [0, 1].map(|_| open(&model, &["-n", "1"]));
    for (i, terminal) in terminals.iter_mut().enumerate() {
        terminal.see(0, "> ");
        terminal.type_and_see(&format!("question {i}\r"), "> ");
    }
    for mut terminal in terminals {
        terminal.keys.write_all(b"/exit\r").unwrap();
        assert_eq!(terminal.code(), Some(0));
    }
    let lines = history(&model);
    assert!(lines.contains(&"question 0".into()) && lines.contains(&"question 1".into()));
}

#[test]
fn a_file_that_is_no_history_stays() {
    let model = model();
    std::fs::write(model.file("history"), "notes\n").unwrap();
    let mut terminal = open(&model, &["-n", "1"]);
    terminal.see(0, "not a chat history");
    terminal.see(0, "> ");
    terminal.type_and_see("hello\r", "> ");
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
    assert_eq!(std::fs::read(model.file("history")).unwrap(), b"notes\n");
}

/// A chat whose model thinks, from the first token on, and never ends by itself.
fn thinking(model: &Model, args: &[&str]) -> Terminal {
    let file = model.file("template");
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>";
    std::fs::write(&file, template).unwrap();
    let args = [&["--chat-template", file.to_str().unwrap(), "-n", "40"], args].concat();
    let terminal = open(model, &args);
    terminal.see(0, "> ");
    terminal
}

/// The end of dim text.
const UNDIM: &str = "\u{1b}[22m";

#[test]
fn reasoning_is_dim_and_the_answer_is_not() {
    let model = model();
    let mut terminal = thinking(&model, &["--reasoning-budget", "3", "-v"]);
    let seen = terminal.type_and_see("hello\r", "peak memory");
    let (reasoning, answer) = seen.rsplit_once(UNDIM).expect("dim text");
    assert!(reasoning.contains("\u{1b}[2m"), "{seen:?}");
    assert!(answer.starts_with("\r\n\r\n") && !seen.contains("think>"), "{seen:?}");
    terminal.type_and_see("/set reasoning-format none\r", "reasoning-format is none");
    let seen = terminal.type_and_see("again\r", "peak memory");
    assert!(seen.contains("</think>") && !seen.contains(UNDIM), "{seen:?}");
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
}

#[test]
fn a_message_without_an_answer_is_no_part_of_the_conversation() {
    let model = model();
    let mut terminal = thinking(&model, &["-v"]);
    // One token a byte: the message and what opens the reasoning.
    let seen = terminal.type_and_see("hello\r", "prompt: 12 tokens");
    assert!(seen.contains("/regen sends the message again"), "{seen:?}");
    terminal.type_and_see("/regen\r", "11 more were in the cache");
    terminal.type_and_see("/think off\r", "no switch");
    terminal.type_and_see("/think\r", "thinking is off");
    terminal.type_and_see("/think odd\r", "expected on, off");
    terminal.type_and_see("/set reasoning-budget 2\r", "reasoning-budget is 2");
    terminal.type_and_see("ab\r", "prompt: 9 tokens");
    terminal.type_and_see("/clear\r", "forgotten");
    let stats = terminal.type_and_see("/stats\r", "nothing has been generated");
    assert!(stats.contains("0 of 256 tokens"), "{stats:?}");
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
}

#[test]
fn every_answer_of_a_chat_has_the_form_that_is_asked_for() {
    let model = model();
    let mut terminal = open(&model, &["-j", "{\"const\": \"yes indeed\"}"]);
    terminal.see(0, "> ");
    for message in ["hello\r", "again\r", "/regen\r"] {
        terminal.type_and_see(message, "\"yes indeed\"");
        terminal.type_and_see("/stats\r", "peak memory");
    }
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
}

/// A text of such a model cannot be cut anywhere: the message is read again from a checkpoint on.
#[test]
fn a_model_with_a_state_repeats_an_answer_without_reading_it_all() {
    let dir = tempfile::tempdir().unwrap();
    let path = convert_golden("qwen3next", "f32", dir.path());
    let model = Model { dir, path };
    let mut terminal = open(&model, &["--conversation", "-c", "512", "-n", "3", "-v"]);
    terminal.see(0, "> ");
    terminal.type_and_see(&format!("{}\r", "a long message ".repeat(12)), "peak memory");
    terminal.type_and_see("/regen\r", " more were in the cache");
    terminal.type_and_see("/exit\r", "");
    assert_eq!(terminal.code(), Some(0));
}
