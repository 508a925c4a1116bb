//! Writes the good inputs of one decoder into a folder, for libFuzzer: `seeds NAME FOLDER`.

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    let folder = std::path::PathBuf::from(arguments.next().unwrap_or_default());
    std::fs::create_dir_all(&folder)?;
    let seeds = (beeline_verify_fuzz::target(&name).seeds)();
    for (number, seed) in seeds.iter().enumerate() {
        std::fs::write(folder.join(format!("seed-{number:02}")), seed)?;
    }
    Ok(())
}
