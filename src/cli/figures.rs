//! Figures as people read them; sizes are in `units`.

use std::time::Duration;

/// "1,024"
pub fn count(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// "1 token", "2 tokens"
pub fn counted(n: usize, noun: &str) -> String {
    let plural = if n == 1 { "" } else { "s" };
    format!("{} {noun}{plural}", count(n))
}

/// "12.3 ms", and seconds from one on.
pub fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        100.0.. => format!("{seconds:.0} s"),
        1.0.. => format!("{seconds:.1} s"),
        _ => format!("{:.1} ms", 1e3 * seconds),
    }
}

/// Time that is only known roughly: "40 s", "3 min", "2 h 5 min".
pub fn long_time(time: Duration) -> String {
    let seconds = time.as_secs_f64().ceil() as u64;
    let minutes = seconds.div_ceil(60);
    match (seconds, minutes / 60, minutes % 60) {
        (..90, ..) => format!("{seconds} s"),
        (_, 0, minutes) => format!("{minutes} min"),
        (_, hours, 0) => format!("{hours} h"),
        (_, hours, minutes) => format!("{hours} h {minutes} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_have_their_plural() {
        assert_eq!([0, 999, 1024, 1_234_567].map(count), ["0", "999", "1,024", "1,234,567"]);
        assert_eq!([0, 1, 2].map(|n| counted(n, "token")), ["0 tokens", "1 token", "2 tokens"]);
        let times = [0.0, 0.0123, 2.14, 132.4].map(|s| time(Duration::from_secs_f64(s)));
        let long = [40, 91, 3600, 3601].map(|s| long_time(Duration::from_secs(s)));
        assert_eq!(long, ["40 s", "2 min", "1 h", "1 h 1 min"]);
        assert_eq!(times, ["0.0 ms", "12.3 ms", "2.1 s", "132 s"]);
    }
}
