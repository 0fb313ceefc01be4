//! Three peers with addresses of their own, in network namespaces of 10 Gbit/s and 20 µs: packets
//! are lost, links go down, peers die. Needs root, `ip` and `tc`; says so where one is missing. A
//! kernel without netem has the rate alone.

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use common::stream::{Answer, tokens, wide};
use common::{convert_golden, repo};
use moeba::engine::Engine;

use crate::support::{PeerProcess, answer, expected, peer_process, signal, slow_head, wait_for};

/// Runs a command; the error is what it said.
fn sh(line: &str) -> Result<(), String> {
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap());
    let output = command.args(words).output().map_err(|e| format!("{line}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{line}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

/// Namespaces on a bridge, until it is dropped.
struct Network {
    bridge: String,
    net: String,
}

const N: usize = 3;

impl Network {
    fn new() -> Result<Network, String> {
        let id = std::process::id();
        let network =
            Network { bridge: format!("mp{id}"), net: format!("10.{}.{}", 64 + id % 64, id % 251) };
        network.build().map(|()| network)
    }

    fn build(&self) -> Result<(), String> {
        let Network { bridge, net } = self;
        sh(&format!("ip link add {bridge} type bridge"))?;
        sh(&format!("ip addr add {net}.1/24 dev {bridge}"))?;
        sh(&format!("ip link set {bridge} up"))?;
        for i in 0..N {
            let (name, link) = (self.name(i), self.link(i));
            sh(&format!("ip netns add {name}"))?;
            sh(&format!("ip link add {link} type veth peer name eth0 netns {name}"))?;
            sh(&format!("ip link set {link} master {bridge} up"))?;
            sh(&format!("ip -n {name} link set lo up"))?;
            sh(&format!("ip -n {name} addr add {net}.{}/24 dev eth0", i + 2))?;
            sh(&format!("ip -n {name} link set eth0 up"))?;
            for device in [format!("ip netns exec {name} tc qdisc add dev eth0"), {
                format!("tc qdisc add dev {link}")
            }] {
                let slow = sh(&format!("{device} root netem rate 10gbit delay 20us"));
                slow.or_else(|_| {
                    sh(&format!("{device} root tbf rate 10gbit burst 1mb latency 10ms"))
                })?;
            }
        }
        Ok(())
    }

    fn name(&self, i: usize) -> String {
        format!("{}n{i}", self.bridge)
    }

    fn link(&self, i: usize) -> String {
        format!("{}v{i}", self.bridge)
    }

    fn start(&self, i: usize, model: &std::path::Path, ram: &str) -> PeerProcess {
        let name = self.name(i);
        let args = ["--host", "0.0.0.0", "--port", "8090", "--ram", ram];
        let mut peer = peer_process(&["ip", "netns", "exec", &name], model, &args);
        peer.url = format!("http://{}.{}:8090", self.net, i + 2);
        peer
    }

    fn set_link(&self, i: usize, state: &str) {
        sh(&format!("ip link set {} {state}", self.link(i))).unwrap();
    }

    /// Loses one packet of a hundred on its way to each peer and from it.
    fn lose(&self, is_on: bool) -> Result<(), String> {
        let action = if is_on { "-A" } else { "-D" };
        for i in 0..N {
            for chain in ["INPUT", "OUTPUT"] {
                let rule = "-m statistic --mode random --probability 0.01 -j DROP";
                let name = self.name(i);
                sh(&format!("ip netns exec {name} iptables {action} {chain} {rule}"))?;
            }
        }
        Ok(())
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for i in 0..N {
            let _ = sh(&format!("ip netns del {}", self.name(i)));
        }
        let _ = sh(&format!("ip link del {}", self.bridge));
    }
}

/// Decodes token by token; `strike` is called in the middle.
fn struck(engine: &Arc<Engine>, tokens: &[u32], strike: impl FnOnce()) -> Answer {
    let mut session = engine.new_session().unwrap();
    let (mut logits, mut strike) = (Vec::new(), Some(strike));
    for (i, token) in tokens.iter().enumerate() {
        if i == tokens.len() / 2 {
            strike.take().into_iter().for_each(|strike| strike());
        }
        let mut take = |_, l: &mut [f32]| logits.extend(l.iter().map(|l| l.to_bits()));
        session.eval_all(&[*token], &mut take).unwrap();
    }
    Answer { logits, experts: Vec::new() }
}

#[test]
fn three_machines_beside_the_head() {
    let network = match Network::new() {
        Ok(network) => network,
        Err(why) => return println!("skipped, as there are no network namespaces: {why}"),
    };
    let dir = tempfile::tempdir().unwrap();
    // Bits, with experts of several granules and with a golden model.
    for path in [wide(dir.path()), convert_golden("deepseek_v3", "q8_0", dir.path())] {
        let tokens = tokens(24, 3);
        let peers = [0, 1, 2].map(|i| network.start(i, &path, "auto"));
        let urls: Vec<&str> = peers.iter().map(|peer| &*peer.url).collect();
        let engine = slow_head(&path, &urls);
        assert!(answer(&engine, &tokens, 8).unwrap() == expected(&path, &tokens), "{path:?}");
        let counters = engine.peer_counters().unwrap();
        assert!(
            counters.received_bytes > 0 && 2 * counters.lost <= counters.experts,
            "{counters:?}"
        );
    }
    let demo = repo().join("models/demo/moeba-demo.gguf");
    let tokens = tokens(48, 7);
    let expected = expected(&demo, &tokens);
    let mut peers = [0, 1, 2].map(|i| network.start(i, &demo, "50%"));
    let urls: Vec<&str> = peers.iter().map(|peer| &*peer.url).collect();
    let engine = slow_head(&demo, &urls);
    let check = |what: &str, strike: &mut dyn FnMut()| {
        let start = Instant::now();
        assert!(struck(&engine, &tokens, strike) == expected, "{what}");
        println!("{what}: {:.1} s, {:?}", start.elapsed().as_secs_f64(), engine.peer_counters());
    };
    check("three peers", &mut || ());
    match network.lose(true) {
        Err(why) => println!("no packets are lost: {why}"),
        Ok(()) => {
            check("one packet of a hundred is lost", &mut || ());
            network.lose(false).unwrap();
        }
    }
    wait_for(&engine, 3);
    check("a link goes down", &mut || network.set_link(0, "down"));
    assert!(engine.n_peers().unwrap().0 < 3);
    network.set_link(0, "up");
    check("a peer is frozen", &mut || signal(&peers[1].child, libc::SIGSTOP));
    signal(&peers[1].child, libc::SIGCONT);
    wait_for(&engine, 3);
    check("a peer is killed", &mut || peers[2].child.kill().unwrap());
    wait_for(&engine, 2);
    assert!(answer(&engine, &tokens, 16).unwrap() == expected);
}
