//! Which devices compute (`--device`): NVIDIA GPUs through their driver, emulated ones in tests, or
//! none, which is the CPU.

use crate::backend::cuda;
use crate::backend::gpu::{Device, DeviceInfo};
#[cfg(feature = "emulated")]
use crate::backend::gpu::{Emulated, emulated::Config};
use crate::engine::plan::vram;
use crate::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// `--device`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The GPUs that there are; the CPU where there is none that can be used.
    #[default]
    Auto,
    Cpu,
    Cuda(Gpus),
    /// For tests: the GPU's kernels run on the CPU, slowly, and every rule is checked.
    #[cfg(feature = "emulated")]
    Emulated(Config),
}

/// Which of the driver's GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gpus {
    All,
    /// By their numbers, the first of which has the dense weights.
    These(Vec<usize>),
}

/// More than a machine has: a slip of the finger.
const MAX_DEVICES: usize = 64;

impl FromStr for DeviceChoice {
    type Err = Error;

    /// `auto`, `cpu`, `cuda`, `cuda:1`, `cuda:0,1`, `emulated`, `emulated:2`; llama.cpp's `none`
    /// and `CUDA0,CUDA1` as well.
    fn from_str(text: &str) -> Result<Self> {
        let text = text.trim().to_ascii_lowercase();
        let parsed = match text.split_once(':').unwrap_or((&text, "")) {
            ("auto", "") => Some(DeviceChoice::Auto),
            ("cpu" | "none", "") => Some(DeviceChoice::Cpu),
            ("cuda", "") if text == "cuda" => Some(DeviceChoice::Cuda(Gpus::All)),
            ("cuda", list) => numbers(list.split(',').map(Some)),
            #[cfg(feature = "emulated")]
            ("emulated", "") if text == "emulated" => Some(emulated(1)),
            #[cfg(feature = "emulated")]
            ("emulated", n) => number(n).filter(|n| *n > 0).map(emulated),
            (list, "") => numbers(list.split(',').map(|name| name.strip_prefix("cuda"))),
            _ => None,
        };
        let parsed = parsed.filter(|_| !text.ends_with(':'));
        parsed.ok_or_else(|| {
            let expected = "expected auto, cpu, cuda, cuda:N or cuda:0,1";
            let emulated =
                if cfg!(feature = "emulated") { ", or emulated (for tests)" } else { "" };
            Error::Usage(format!("{expected}{emulated}"))
        })
    }
}

#[cfg(feature = "emulated")]
fn emulated(devices: usize) -> DeviceChoice {
    DeviceChoice::Emulated(Config { devices, ..Config::default() })
}

fn number(text: &str) -> Option<usize> {
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|n| plain && *n < MAX_DEVICES)
}

/// Numbers of GPUs, none of them twice.
fn numbers<'a>(texts: impl Iterator<Item = Option<&'a str>>) -> Option<DeviceChoice> {
    let mut these = Vec::new();
    for text in texts {
        let n = number(text?).filter(|n| !these.contains(n))?;
        these.push(n);
    }
    Some(DeviceChoice::Cuda(Gpus::These(these)))
}

impl DeviceChoice {
    /// Whether the CPU may take the place of what was found.
    pub fn is_auto(&self) -> bool {
        match self {
            DeviceChoice::Auto => true,
            #[cfg(feature = "emulated")]
            DeviceChoice::Emulated(config) => config.is_auto,
            _ => false,
        }
    }

    pub fn is_emulated(&self) -> bool {
        #[cfg(feature = "emulated")]
        return matches!(self, DeviceChoice::Emulated(_));
        #[cfg(not(feature = "emulated"))]
        false
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(Gpus::All) => f.write_str("cuda"),
            DeviceChoice::Cuda(Gpus::These(these)) => {
                let these: Vec<String> = these.iter().map(usize::to_string).collect();
                write!(f, "cuda:{}", these.join(","))
            }
            #[cfg(feature = "emulated")]
            DeviceChoice::Emulated(Config { devices: 1, .. }) => f.write_str("emulated"),
            #[cfg(feature = "emulated")]
            DeviceChoice::Emulated(config) => write!(f, "emulated:{}", config.devices),
        }
    }
}

/// Opens what was chosen; none is the CPU. What was asked for by name and is not there is an error;
/// `Auto` takes what there is and says which, and why.
pub fn open(choice: &DeviceChoice) -> Result<Vec<Device>> {
    match choice {
        DeviceChoice::Cpu => Ok(Vec::new()),
        DeviceChoice::Cuda(Gpus::All) => cuda::devices().map_err(not_there),
        DeviceChoice::Cuda(Gpus::These(these)) => {
            cuda::devices().map_err(not_there).and_then(|found| select(found, these))
        }
        #[cfg(feature = "emulated")]
        DeviceChoice::Emulated(config) => {
            let devices = Emulated::devices(config);
            log::warn!("the emulated GPU is for tests: it is slow, and its timings mean nothing");
            Ok(devices)
        }
        DeviceChoice::Auto => Ok(automatic()),
    }
}

fn automatic() -> Vec<Device> {
    if !cuda::has_driver() {
        log::info!("running on the CPU: there is no NVIDIA driver");
        return Vec::new();
    }
    match cuda::devices() {
        Ok(devices) => {
            log::info!("running on {}", list(&devices));
            devices
        }
        Err(why) => {
            log::warn!("running on the CPU: {why}");
            Vec::new()
        }
    }
}

/// The flag that asked for it belongs to the sentence.
fn not_there(why: Error) -> Error {
    Error::Device(format!("--device cuda: {why}"))
}

/// The devices of `found` that have these numbers, in this order; the others are closed.
fn select(found: Vec<Device>, these: &[usize]) -> Result<Vec<Device>> {
    let device = |n: &usize| {
        let device = found.iter().find(|device| device.info().index == *n);
        device.cloned().ok_or_else(|| {
            let usable = list(&found);
            Error::Device(format!("--device cuda:{n}: there is no such GPU; usable: {usable}"))
        })
    };
    these.iter().map(device).collect()
}

fn list(devices: &[Device]) -> String {
    devices.iter().map(|device| name(device.info())).collect::<Vec<_>>().join(", ")
}

/// "GPU 0 (NVIDIA L4)"
pub fn name(info: &DeviceInfo) -> String {
    format!("GPU {} ({})", info.index, info.name)
}

/// Warns where not all of the bytes that were allocated since `free_before` was asked for are in
/// the device's own memory.
pub fn warn_of_spill(device: &Device, free_before: u64, allocated: u64) -> Result<()> {
    let free_after = device.memory()?.free_bytes as u64;
    match vram::spilled_bytes(free_before, free_after, allocated) {
        0 => {}
        bytes => log::warn!("{}: {}", name(device.info()), vram::spill_warning(bytes)),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(text: &str) -> DeviceChoice {
        text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    #[test]
    fn names_of_devices_are_read_and_written() {
        for text in ["auto", "cpu", "cuda", "cuda:1", "cuda:1,0", "emulated", "emulated:3"] {
            assert_eq!(choice(text).to_string(), text);
        }
        let these = DeviceChoice::Cuda(Gpus::These(vec![1, 0]));
        for text in ["cuda:1,0", "CUDA1,CUDA0", " Cuda:1,0 "] {
            assert_eq!(choice(text), these, "{text}");
        }
        assert_eq!(choice("none"), DeviceChoice::Cpu);
        assert_eq!(choice("emulated:1"), choice("emulated"));
    }

    #[test]
    fn other_texts_are_no_devices() {
        let bad = [
            "",
            ":",
            "gpu",
            "cuda:",
            "cuda:x",
            "cuda:-1",
            "cuda:+1",
            "cuda:0,0",
            "cuda:0,",
            "cpu:",
            "cuda:64",
            "cpu:0",
            "auto:1",
            "emulated:",
            "emulated:0",
            "emulated:65",
            "cuda0,x1",
            "cuda0,",
            "vulkan0",
            "cuda:0:1",
            "0",
        ];
        for text in bad {
            let message = text.parse::<DeviceChoice>().map(|c| format!("{text:?} is {c:?}"));
            assert!(message.as_ref().unwrap_err().to_string().contains("cuda:N"), "{message:?}");
        }
    }

    #[test]
    fn the_cpu_is_no_device_and_emulated_ones_are_as_many_as_asked_for() {
        assert!(open(&DeviceChoice::Cpu).unwrap().is_empty());
        assert_eq!(open(&choice("emulated:2")).unwrap().len(), 2);
    }

    /// On machines with a GPU and without one: an answer, or a sentence that names the flag.
    #[test]
    fn what_is_asked_for_by_name_is_there_or_an_error() {
        let found = open(&DeviceChoice::Auto).unwrap();
        match open(&choice("cuda")) {
            Ok(devices) => assert_eq!(devices.len(), found.len()),
            Err(why) => {
                assert!(found.is_empty());
                assert!(why.to_string().starts_with("--device cuda: "), "{why}");
            }
        }
        let why = open(&choice("cuda:63")).err().expect("no machine has so many").to_string();
        assert!(why.starts_with("--device cuda"), "{why}");
    }

    #[test]
    fn numbers_that_are_not_there_are_named_with_those_that_are() {
        let found = open(&choice("emulated:2")).unwrap();
        let both = select(found.clone(), &[1, 0]).unwrap();
        assert_eq!(both.iter().map(|d| d.info().index).collect::<Vec<_>>(), [1, 0]);
        let why = select(found, &[0, 2]).err().unwrap().to_string();
        for word in ["cuda:2", "GPU 0 (emulated)", "GPU 1 (emulated)"] {
            assert!(why.contains(word), "{why}");
        }
    }
}
