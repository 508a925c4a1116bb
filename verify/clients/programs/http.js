// An HTTP server that answers with the body's digest, and a client that looks: http.js MODE PORT
const crypto = require('crypto');
const http = require('http');

const [mode, port] = process.argv.slice(2);
const digest = (body) => crypto.createHash('sha1').update(body).digest('hex').repeat(1000);

function serve() {
  http.createServer((request, response) => {
    const parts = [];
    request.on('data', (part) => parts.push(part));
    request.on('end', () => response.end(digest(Buffer.concat(parts))));
  }).listen(Number(port), '127.0.0.1');
}

function ask() {
  const agent = new http.Agent({ keepAlive: true, maxSockets: 4 });
  let left = 60;
  for (let turn = 0; turn < 60; turn++) {
    const body = crypto.randomBytes((turn * 7919) % 200000);
    const options = { host: '127.0.0.1', port: Number(port), method: 'POST', agent };
    const request = http.request(options, (response) => {
      const parts = [];
      response.on('data', (part) => parts.push(part));
      response.on('end', () => {
        if (Buffer.concat(parts).toString() !== digest(body)) {
          console.log('another digest');
          process.exit(1);
        }
        left -= 1;
        if (left === 0) {
          console.log('all right');
          agent.destroy();
        }
      });
    });
    request.end(body);
  }
}

mode === 'serve' ? serve() : ask();
