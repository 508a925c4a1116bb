//! The status address of a running graph: `/metrics`, `/stats.json` and a page.
//!
//! What is shown is asked of the run by its socket, as `beeline nf top` asks it.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use beeline_nf::live;
use beeline_nf::statistics::{COMMAND, Statistics};

use crate::exit::{Exit, Failure, OrExit as _};
use crate::status::{Page, Section, Source, StatusServer};

struct Running {
    control: PathBuf,
    file: String,
}

impl Running {
    fn ask(&self) -> anyhow::Result<Statistics> {
        let answer = live::command(&self.control, COMMAND).context("the graph does not answer")?;
        let text = answer.map_err(|why| anyhow::anyhow!(why))?;
        serde_json::from_str(&text).context("the answer is no statistics")
    }
}

impl Source for Running {
    fn page(&self) -> Page {
        let mut page = Page::new(&self.file);
        let Ok(now) = self.ask() else { return page };
        let channels = now.channels.iter().map(|channel| {
            let fill = format!("{} items, {} of {}", channel.items, channel.waiting, channel.depth);
            (channel.channel.clone(), fill)
        });
        let elements = now.elements.iter().map(|element| {
            (element.instance.clone(), format!("{} iterations", element.iterations))
        });
        page.push(Section::facts("Channels", channels.collect()));
        page.push(Section::facts("Elements", elements.collect()));
        page
    }

    fn stats(&self) -> serde_json::Value {
        let now = self.ask().ok().and_then(|now| serde_json::to_value(now).ok());
        now.unwrap_or_default()
    }

    fn metrics(&self) -> String {
        self.ask().unwrap_or_default().exposition()
    }

    fn health(&self) -> Result<(), String> {
        self.ask().map(drop).map_err(|error| format!("{error:#}"))
    }
}

/// Serves the status of the run behind `control`; the address, which a port of 0 leaves open.
///
/// Errors: the address cannot be listened at.
pub fn start(
    address: SocketAddr,
    control: PathBuf,
    file: String,
) -> Result<(StatusServer, SocketAddr), Failure> {
    let listener = TcpListener::bind(address)
        .with_context(|| format!("cannot listen at {address}"))
        .or_exit(Exit::Failed)?;
    let address = listener.local_addr()?;
    Ok((StatusServer::start(listener, Arc::new(Running { control, file }))?, address))
}
