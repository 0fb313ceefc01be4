//! Sizes as people read them: the one place for units and rounding.

/// Units of 1024 with the decimals that they are printed with.
const UNITS: [(&str, usize); 5] = [("B", 0), ("KiB", 1), ("MiB", 1), ("GiB", 2), ("TiB", 2)];

type Rounding = fn(f64) -> f64;

/// In the largest unit that it fills: `512 B`, `8.5 MiB`, `1.25 GiB`.
pub fn size(bytes: u64) -> String {
    of_unit(bytes, unit(bytes, f64::round), f64::round)
}

/// Rounded up: who gives it back as a size gives enough.
pub fn at_least(bytes: u64) -> String {
    of_unit(bytes, unit(bytes, f64::ceil), f64::ceil)
}

/// Rounded down: so much there is.
pub fn at_most(bytes: u64) -> String {
    of_unit(bytes, unit(bytes, f64::floor), f64::floor)
}

fn of_unit(bytes: u64, unit: usize, rounding: Rounding) -> String {
    printed(ticks(bytes, unit, rounding), unit)
}

/// Which unit; what rounds to 1024 of one is 1 of the next.
fn unit(bytes: u64, rounding: Rounding) -> usize {
    let fits = |unit: &usize| ticks(bytes, *unit, rounding) < 1024.0 * ticks_of_one(*unit);
    (0..UNITS.len()).find(fits).unwrap_or(UNITS.len() - 1)
}

/// The size in steps of the last decimal that is printed.
fn ticks(bytes: u64, unit: usize, rounding: Rounding) -> f64 {
    rounding(bytes as f64 * ticks_of_one(unit) / 1024f64.powi(unit as i32))
}

fn ticks_of_one(unit: usize) -> f64 {
    10f64.powi(UNITS[unit].1 as i32)
}

fn printed(ticks: f64, unit: usize) -> String {
    let (name, decimals) = UNITS[unit];
    format!("{:.decimals$} {name}", ticks / ticks_of_one(unit))
}

/// A sum whose printed parts add up to the printed total: all of them have one unit, the parts are
/// rounded up, and the total is the sum of what is printed.
pub struct Sum {
    unit: usize,
    parts: Vec<(String, f64)>,
}

impl Sum {
    /// Parts of 0 bytes are left out.
    pub fn of(parts: &[(String, u64)]) -> Sum {
        let unit = unit(parts.iter().map(|(_, bytes)| bytes).sum(), f64::ceil);
        let parts = parts.iter().filter(|(_, bytes)| *bytes > 0);
        let parts = parts.map(|(what, bytes)| (what.clone(), ticks(*bytes, unit, f64::ceil)));
        Sum { unit, parts: parts.collect() }
    }

    pub fn total(&self) -> String {
        printed(self.parts.iter().map(|(_, ticks)| ticks).sum(), self.unit)
    }

    /// `dense weights 356.2 MiB, KV cache 8.0 MiB`
    pub fn parts(&self) -> String {
        let part = |(what, ticks): &(String, f64)| format!("{what} {}", printed(*ticks, self.unit));
        self.parts.iter().map(part).collect::<Vec<_>>().join(", ")
    }

    /// Beside the total: what there is of it, in the same unit and rounded down.
    pub fn there_is(&self, bytes: u64) -> String {
        of_unit(bytes, self.unit, f64::floor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_largest_unit_that_they_fill() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 10, "1.0 KiB"),
            (512 << 10, "512.0 KiB"),
            // Not 1024.0 KiB.
            ((1 << 20) - 1, "1.0 MiB"),
            ((8 << 20) + (1 << 19), "8.5 MiB"),
            (1023 << 20, "1023.0 MiB"),
            (5 << 28, "1.25 GiB"),
            (200 << 30, "200.00 GiB"),
            (3 << 39, "1.50 TiB"),
            (u64::MAX, "16777216.00 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(size(bytes), text);
        }
    }

    #[test]
    fn needs_are_rounded_up_and_room_is_rounded_down() {
        let odd = (40 << 20) + 1;
        assert_eq!((at_least(odd).as_str(), at_most(odd).as_str()), ("40.1 MiB", "40.0 MiB"));
        assert_eq!((at_least(40 << 20), at_most(40 << 20)), ("40.0 MiB".into(), "40.0 MiB".into()));
        let gib = (1 << 30) + 1;
        assert_eq!((at_least(gib).as_str(), at_most(gib).as_str()), ("1.01 GiB", "1.00 GiB"));
        assert_eq!(at_least((1 << 30) - 1), "1.00 GiB");
        assert_eq!(at_most((1 << 30) - 1), "1023.9 MiB");
    }

    /// The first number of a text.
    fn number(text: &str) -> f64 {
        text.split(' ').find_map(|word| word.parse().ok()).unwrap()
    }

    #[test]
    fn printed_parts_add_up() {
        let part = |what: &str, bytes| (what.to_owned(), bytes);
        let parts = [part("weights", 373_500_001), part("cache", 1), part("none", 0)];
        let sum = Sum::of(&parts);
        assert_eq!(sum.parts(), "weights 356.2 MiB, cache 0.1 MiB");
        assert_eq!((sum.total(), sum.there_is(5 << 30)), ("356.3 MiB".into(), "5120.0 MiB".into()));
        let large = Sum::of(&[part("weights", 3 << 29), part("cache", 1 << 20)]);
        assert_eq!(large.parts(), "weights 1.50 GiB, cache 0.01 GiB");
        assert_eq!(
            (large.total(), large.there_is(1 << 29)),
            ("1.51 GiB".into(), "0.50 GiB".into())
        );
        for shift in 0..32 {
            let parts: Vec<_> = (0..7).map(|i| part("x", (i * 7919 + 13) << shift)).collect();
            let sum = Sum::of(&parts);
            let printed: f64 = sum.parts().split(", ").map(number).sum();
            assert!((printed - number(&sum.total())).abs() < 1e-6, "{shift}: {}", sum.parts());
        }
    }
}
