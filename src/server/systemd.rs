//! Tells systemd how the service is: a line `KEY=VALUE` or several, in one datagram to the socket
//! that `NOTIFY_SOCKET` names (sd_notify(3)), if the variable is set.

use std::io;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Sends a state, as `READY=1`. A manager that cannot be told is no reason to end.
pub fn tell(state: &str) {
    let Some(name) = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
        return;
    };
    if let Err(e) = address(name.as_encoded_bytes()).and_then(|to| send(&to, state)) {
        log::warn!("NOTIFY_SOCKET: {}: {e}", name.display());
    }
}

/// A path, or a name in the abstract namespace behind an `@`.
fn address(name: &[u8]) -> io::Result<SocketAddr> {
    #[cfg(target_os = "linux")]
    if let Some(name) = name.strip_prefix(b"@") {
        use std::os::linux::net::SocketAddrExt;
        return SocketAddr::from_abstract_name(name);
    }
    use std::os::unix::ffi::OsStrExt;
    SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(name))
}

fn send(to: &SocketAddr, state: &str) -> io::Result<()> {
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), to).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_sockets_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let hidden = format!("@moeba-{}", std::process::id());
        for name in [path.to_str().unwrap(), &hidden] {
            let to = address(name.as_bytes()).unwrap();
            let manager = UnixDatagram::bind_addr(&to).unwrap();
            send(&to, "READY=1\nSTATUS=model.gguf").unwrap();
            let mut got = [0; 64];
            let n = manager.recv(&mut got).unwrap();
            assert_eq!(&got[..n], b"READY=1\nSTATUS=model.gguf", "{name}");
        }
    }
}
