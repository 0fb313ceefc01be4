//! Whether streams may wait for the host. The driver's manual warns that such waits can deadlock: a
//! wait holds up what stands behind it in a hardware queue, and a launch that blocks the thread
//! that is to end the wait never returns.

use crate::backend::gpu::host_waits::asked;
use std::path::Path;

/// The beginnings of variables that profilers, debuggers and sanitizers set in the programs that
/// they run. They make launches wait for each other.
const TOOLS: &[&str] = &[
    "CUDA_INJECTION",
    "CUDBG",
    "NSIGHT",
    "NSYS",
    "NVTX_INJECTION",
    "NV_COMPUTE_PROFILER",
    "NV_NSIGHT",
    "NV_SANITIZER",
    "NV_TPS",
    "COMPUTE_SANITIZER",
];

/// Why streams must not wait for the host, as a clause.
pub fn refused() -> Option<String> {
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    reason(asked(), names, &|name| std::env::var(name).ok(), is_wsl())
}

fn reason(
    asked: Option<bool>,
    mut names: impl Iterator<Item = String>,
    value: &dyn Fn(&str) -> Option<String>,
    is_wsl: bool,
) -> Option<String> {
    let is = |name: &str, is: &str| value(name).is_some_and(|value| value.trim() == is);
    match asked {
        Some(true) => return None,
        Some(false) => return Some("MOEBA_GPU_WAITS is 0".into()),
        None => {}
    }
    if cfg!(windows) || is_wsl {
        return Some("Windows schedules the GPU".into());
    }
    if value("CUDA_LAUNCH_BLOCKING").is_some() && !is("CUDA_LAUNCH_BLOCKING", "0") {
        return Some("CUDA_LAUNCH_BLOCKING is set".into());
    }
    if is("CUDA_DEVICE_MAX_CONNECTIONS", "1") {
        return Some("CUDA_DEVICE_MAX_CONNECTIONS is 1".into());
    }
    let tool = names.find(|name| TOOLS.iter().any(|tool| name.starts_with(tool)))?;
    Some(format!("{tool} is set, as by a profiler"))
}

fn is_wsl() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    Path::new("/dev/dxg").exists() || release.to_ascii_lowercase().contains("microsoft")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(vars: &[(&str, &str)], asked: Option<bool>, is_wsl: bool) -> Option<String> {
        let value = |name: &str| {
            vars.iter().find(|(other, _)| *other == name).map(|(_, value)| value.to_string())
        };
        reason(asked, vars.iter().map(|(name, _)| name.to_string()), &value, is_wsl)
    }

    #[test]
    fn waits_are_left_out_where_they_may_deadlock() {
        assert_eq!(with(&[("PATH", "/bin"), ("CUDA_VISIBLE_DEVICES", "0")], None, false), None);
        assert_eq!(with(&[("CUDA_LAUNCH_BLOCKING", "0")], None, false), None);
        assert_eq!(with(&[("CUDA_DEVICE_MAX_CONNECTIONS", "8")], None, false), None);
        let refused = [
            with(&[], Some(false), false),
            with(&[], None, true),
            with(&[("CUDA_LAUNCH_BLOCKING", "1")], None, false),
            with(&[("CUDA_DEVICE_MAX_CONNECTIONS", "1")], None, false),
            with(&[("CUDA_INJECTION64_PATH", "/opt/nsys.so")], None, false),
        ];
        assert!(refused.iter().all(Option::is_some), "{refused:?}");
        assert_eq!(with(&[("CUDA_LAUNCH_BLOCKING", "1")], Some(true), true), None);
    }
}
