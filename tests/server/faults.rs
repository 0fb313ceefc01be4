//! A server whose disk fails: requests end with an error or their answer, and later ones are right.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::stream::{Disk, budget};
use moeba::engine::{Engine, EngineOptions, TestHooks};
use moeba::experts::disk::IoKind;
use moeba::server::{Server, ServerOptions};
use serde_json::json;

use crate::support::{self, Answer, model};

const N: usize = 12;

/// A server in this process, whose reads of experts go through `disk`.
fn serve(disk: &Arc<Disk>) -> Server {
    let grace = Duration::from_secs(5);
    let server = Server::bind(ServerOptions { grace, ..support::options() }).unwrap();
    let options = EngineOptions {
        n_ctx: Some(512),
        n_sessions: 2,
        n_threads: Some(2),
        ram: budget(&model(), 0.3),
        policy: "on-demand".parse().unwrap(),
        io: IoKind::Pread,
        test: TestHooks { faults: Some(disk.clone()), ..TestHooks::default() },
        ..EngineOptions::default()
    };
    let engine = Engine::load(&model(), &options, &mut |_| ()).unwrap();
    server.open(support::loaded(engine, options)).unwrap();
    server
}

fn ask(server: &Server, i: usize) -> Answer {
    let body = json!({"messages": [{"role": "user", "content": format!("What is {}?", i % 7)}],
        "max_tokens": 3, "seed": i, "stream": i.is_multiple_of(2)});
    support::post_to(server.url(), "/v1/chat/completions", &body)
}

/// The text of an answer; `None` if it says that a read has failed. Anything else is a fault.
fn text(answer: &Answer) -> Option<String> {
    let is_stream = answer.header("content-type").is_some_and(|kind| kind.contains("event-stream"));
    if !is_stream {
        let json = answer.json();
        if answer.status == 500 {
            assert_eq!(json["error"]["code"], "io_error", "{answer:?}");
            return None;
        }
        assert_eq!(answer.status, 200, "{answer:?}");
        return Some(json["choices"][0]["message"]["content"].as_str().unwrap().to_owned());
    }
    let frames = answer.frames();
    if frames.last().unwrap() != "[DONE]" {
        let last: serde_json::Value = serde_json::from_str(frames.last().unwrap()).unwrap();
        assert_eq!(last["error"]["code"], "io_error", "{answer:?}");
        return None;
    }
    let chunks = answer.chunks();
    let deltas = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str());
    Some(deltas.collect())
}

#[test]
fn requests_end_and_the_server_lives_on_while_reads_fail() {
    let disk: Arc<Disk> = Arc::default();
    let server = serve(&disk);
    let right: Vec<_> = (0..N).map(|i| text(&ask(&server, i)).unwrap()).collect();
    // One place in so many is bad, others in each round.
    let (mut n_failed, mut n_right) = (0, 0);
    for one_in in [100, 15] {
        disk.bad_times.store(1, Ordering::SeqCst);
        disk.bad_one_in.store(one_in, Ordering::SeqCst);
        let n_before = disk.n_failed();
        std::thread::scope(|scope| {
            let ask_some = |first: usize| {
                let (server, right) = (&server, &right);
                move || {
                    let ends = (first..N).step_by(4).map(|i| (i, text(&ask(server, i))));
                    let ends: Vec<_> = ends.collect();
                    let wrong = ends
                        .iter()
                        .filter(|(i, text)| text.as_ref().is_some_and(|text| *text != right[*i]));
                    assert_eq!(wrong.count(), 0);
                    ends.iter().filter(|(_, text)| text.is_none()).count()
                }
            };
            let clients: Vec<_> = (0..4).map(|first| scope.spawn(ask_some(first))).collect();
            let failed: usize = clients.into_iter().map(|client| client.join().unwrap()).sum();
            n_failed += failed;
            n_right += N - failed;
        });
        assert!(disk.n_failed() > n_before, "no read has failed");
    }
    assert!(n_right > 0, "{n_failed} of {} have failed", 2 * N);
    disk.bad_times.store(u64::MAX, Ordering::SeqCst);
    disk.bad_one_in.store(2, Ordering::SeqCst);
    let broken = (0..N).filter(|i| text(&ask(&server, *i)).is_none()).count();
    assert!(broken > 0, "every second place is bad for ever, and no request has failed");
    disk.mend();
    for (i, right) in right.iter().enumerate() {
        assert_eq!(text(&ask(&server, i)).as_deref(), Some(right.as_str()), "{i}");
    }
    server.stop();
}
