//! A connection between head and peer that can be told to damage what it carries.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

/// The fate of answers with experts. Greetings pass, but for `Closed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Mode {
    Pass,
    /// A bit of the body is another.
    Flip,
    /// The body ends in the middle.
    Cut,
    /// The body has more bytes than were asked for.
    More,
    /// No answer comes, and the connection stays open.
    Hang,
    /// An answer of another status.
    Refuse,
    /// Connections are closed at once.
    Closed,
}

const MODES: [Mode; 7] =
    [Mode::Pass, Mode::Flip, Mode::Cut, Mode::More, Mode::Hang, Mode::Refuse, Mode::Closed];

pub struct Middle {
    pub url: String,
    mode: Arc<AtomicU32>,
}

impl Middle {
    /// A connection to the peer at `url`.
    pub fn to(url: &str) -> Middle {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = format!("http://{}", listener.local_addr().unwrap());
        let (mode, to) =
            (Arc::new(AtomicU32::new(0)), url.trim_start_matches("http://").to_owned());
        let of_thread = mode.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, to, mode) = (client.unwrap(), to.clone(), of_thread.clone());
                std::thread::spawn(move || carry(client, &to, &mode));
            }
        });
        Middle { url: own, mode }
    }

    pub fn set(&self, mode: Mode) {
        self.mode.store(mode as u32, SeqCst);
    }
}

/// A whole message: its head and its body.
fn message(stream: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).ok()? == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-length").then(|| value.parse::<usize>().unwrap())
    });
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body).ok()?;
    Some((head, body))
}

fn carry(mut client: TcpStream, to: &str, mode: &AtomicU32) {
    let mut peer = TcpStream::connect(to).unwrap();
    let mode = || MODES[mode.load(SeqCst) as usize];
    while mode() != Mode::Closed {
        let Some((head, body)) = message(&mut client) else { break };
        let is_work = head.starts_with("POST");
        peer.write_all(head.as_bytes()).unwrap();
        peer.write_all(&body).unwrap();
        let Some((mut head, mut body)) = message(&mut peer) else { break };
        let n = body.len();
        match mode() {
            Mode::Closed => break,
            Mode::Flip if is_work => body[n / 2] ^= 4,
            Mode::More if is_work => {
                body.extend_from_slice(&[0; 999]);
                head = head.replace(&format!("{n}\r\n"), &format!("{}\r\n", n + 999));
            }
            Mode::Cut if is_work => {
                let _ = client.write_all(head.as_bytes());
                let _ = client.write_all(&body[..n / 2]);
                break;
            }
            Mode::Hang if is_work => {
                while mode() == Mode::Hang {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            Mode::Refuse if is_work => {
                head = "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 3\r\n\r\n".into();
                body = b"no!".to_vec();
            }
            _ => {}
        }
        if client.write_all(head.as_bytes()).and_then(|()| client.write_all(&body)).is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Both);
}
