//! The client behind a proxy: `X-Forwarded-For`, as far as who says it is trusted.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use hyper::HeaderMap;

use crate::{Error, Result};

/// An address, or all that begin with the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    n_bits: u8,
}

impl FromStr for Network {
    type Err = Error;

    /// `10.0.0.1`, `10.0.0.0/8` or `fd00::/8`.
    fn from_str(text: &str) -> Result<Network> {
        let wrong =
            || Error::Usage(format!("expected an address as 10.0.0.1 or 10.0.0.0/8: {text}"));
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.trim().parse().map_err(|_| wrong())?;
        let all = if address.is_ipv4() { 32 } else { 128 };
        let n_bits = match bits {
            Some(bits) => bits.parse().ok().filter(|n| *n <= all).ok_or_else(wrong)?,
            None => all,
        };
        Ok(Network { address: address.to_canonical(), n_bits })
    }
}

impl Network {
    fn has(&self, other: IpAddr) -> bool {
        let prefix = |bits: u128, all: u32| bits.checked_shr(all - u32::from(self.n_bits));
        match (self.address, other) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let [own, other] = [own, other].map(|ip| prefix(u128::from(u32::from(ip)), 32));
                own == other
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let [own, other] = [own, other].map(|ip| prefix(u128::from(ip), 128));
                own == other
            }
            _ => false,
        }
    }
}

/// Whether what an address says of its clients is believed: this machine's programs, and proxies
/// that the command line names. They themselves have no bound.
pub fn is_trusted(address: Option<IpAddr>, proxies: &[Network]) -> bool {
    address
        .map(|ip| ip.to_canonical())
        .is_none_or(|ip| ip.is_loopback() || proxies.iter().any(|network| network.has(ip)))
}

/// The address of the client: that of the connection or, where it is trusted, the last one that
/// `X-Forwarded-For` names and that is not trusted itself.
pub fn client(
    connected: Option<IpAddr>,
    headers: &HeaderMap,
    proxies: &[Network],
) -> Option<IpAddr> {
    let mut client = connected.map(|ip| ip.to_canonical());
    let lines: Vec<&str> =
        headers.get_all("x-forwarded-for").iter().filter_map(|line| line.to_str().ok()).collect();
    let mut said = lines.iter().flat_map(|line| line.split(',')).rev();
    while is_trusted(client, proxies)
        && let Some(next) = said.next().and_then(|text| address(text.trim()))
    {
        client = Some(next);
    }
    client
}

/// An address, also one with a port.
fn address(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let with_port = || text.parse::<SocketAddr>().ok().map(|address| address.ip());
    let address = bare.parse::<IpAddr>().ok().or_else(with_port);
    address.map(|ip| ip.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn networks(texts: &[&str]) -> Vec<Network> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn networks_are_prefixes() {
        for (network, inside, outside) in [
            ("10.0.0.0/8", "10.255.0.1", "11.0.0.1"),
            ("192.168.1.7", "192.168.1.7", "192.168.1.6"),
            ("10.0.0.128/25", "10.0.0.200", "10.0.0.100"),
            ("fd00::/8", "fd12::1", "fe80::1"),
            ("0.0.0.0/0", "8.8.8.8", "::1"),
        ] {
            let network: Network = network.parse().unwrap();
            assert!(network.has(inside.parse().unwrap()), "{network:?} {inside}");
            assert!(!network.has(outside.parse().unwrap()), "{network:?} {outside}");
        }
        for bad in ["", "10.0.0", "10.0.0.1/33", "10.0.0.1/", "fd00::/129", "proxy.local"] {
            assert!(bad.parse::<Network>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_client_is_the_last_address_that_a_trusted_one_names() {
        let proxies = networks(&["10.0.0.0/8"]);
        let local = Some(IpAddr::from([127, 0, 0, 1]));
        let of = |connected: Option<IpAddr>, lines: &[&str]| {
            let mut headers = HeaderMap::new();
            for line in lines {
                headers.append("x-forwarded-for", line.parse().unwrap());
            }
            client(connected, &headers, &proxies).map(|ip| ip.to_string())
        };
        let known = |text: &str| Some(text.to_owned());
        assert_eq!(of(local, &[]), known("127.0.0.1"));
        assert_eq!(of(None, &[]), None);
        assert_eq!(of(local, &["1.2.3.4"]), known("1.2.3.4"));
        assert_eq!(of(None, &["1.2.3.4:567"]), known("1.2.3.4"));
        assert_eq!(of(local, &["[2001:db8::1]:9"]), known("2001:db8::1"));
        // What a client itself says comes before what its proxy adds.
        assert_eq!(of(local, &["9.9.9.9, 1.2.3.4"]), known("1.2.3.4"));
        assert_eq!(of(local, &["9.9.9.9", "1.2.3.4, 10.1.1.1"]), known("1.2.3.4"));
        assert_eq!(of(local, &["nonsense"]), known("127.0.0.1"));
        assert_eq!(of(local, &["1.2.3.4, nonsense"]), known("127.0.0.1"));
        let stranger = Some(IpAddr::from([8, 8, 8, 8]));
        assert_eq!(of(stranger, &["1.2.3.4"]), known("8.8.8.8"));
    }
}
